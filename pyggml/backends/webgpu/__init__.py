"""GPUs through WebGPU (wgpu-py): Vulkan, Metal or Direct3D 12, one set of shaders, float32."""

from pyggml.backends.webgpu.opening import open_webgpu

__all__ = ["open_webgpu"]
