"""Which adapter there is, and what is missing where there is none. wgpu comes on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pyggml.errors import DeviceError
from pyggml.extras import how_to_install

if TYPE_CHECKING:
    from pyggml.backends.webgpu.runtime.device import WebGPUBackend

WANTED = how_to_install("webgpu")


def open_webgpu(compute: Literal["f32", "f16"] = "f32") -> WebGPUBackend:
    """The backend of the adapter that the system prefers for heavy work.

    compute: "f16" rounds weights to float16 before products.

    Raises DeviceError, one sentence that names what is missing, if there is none.
    """
    adapter = _adapter()
    from pyggml.backends.webgpu.runtime.device import WebGPUBackend

    return WebGPUBackend(adapter, compute=compute)


def adapter_name() -> str:
    """The name of that adapter, and what drives it. Raises DeviceError if there is none."""
    adapter = _adapter()
    from pyggml.backends.webgpu.runtime.device import name_of

    return name_of(adapter)


def _adapter() -> Any:
    try:
        import wgpu
    except ImportError as error:
        raise DeviceError(f"no WebGPU device: wgpu is missing, wanted {WANTED}") from error
    try:
        return wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    except (RuntimeError, ImportError, OSError) as error:  # no adapter, or wgpu lacks what it loads
        said = " ".join(str(error).split())[:200]
        raise DeviceError(
            f"no WebGPU device: {said}; wanted a driver of Vulkan, Metal or Direct3D 12"
        ) from error
