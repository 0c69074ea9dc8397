"""Which adapter there is, and what is missing where there is none. wgpu comes on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyggml.errors import DeviceError

if TYPE_CHECKING:
    from pyggml.backends.webgpu.device import WebGPUBackend

WANTED = "pip install 'pyggml[webgpu]'"


def open_webgpu() -> WebGPUBackend:
    """The backend of the adapter that the system prefers for heavy work.

    Raises DeviceError, one sentence that names what is missing, if there is none.
    """
    try:
        import wgpu
    except ImportError as error:
        raise DeviceError(f"no WebGPU device: wgpu is missing, wanted {WANTED}") from error
    try:
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        raise DeviceError(
            f"no WebGPU device: {said}; wanted a driver of Vulkan, Metal or Direct3D 12"
        ) from error
    from pyggml.backends.webgpu.device import WebGPUBackend

    return WebGPUBackend(adapter)
