"""GPUs through WebGPU (wgpu-py): Vulkan, Metal and Direct3D 12 with one set of shaders, in float32."""

from pyggml.backends.webgpu.opening import open_webgpu

__all__ = ["open_webgpu"]
