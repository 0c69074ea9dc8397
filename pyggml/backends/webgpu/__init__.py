"""GPUs through WebGPU (wgpu-py): Vulkan, Metal or Direct3D 12, one set of shaders."""

from pyggml.backends.webgpu.runtime.opening import adapter_name, open_webgpu

__all__ = ["adapter_name", "open_webgpu"]
