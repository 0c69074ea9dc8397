"""The devices that a word names: cpu, cuda, cuda:1, webgpu, auto."""

from __future__ import annotations

from typing import Literal

from pyggml.backends.base import Backend
from pyggml.errors import ConfigError, DeviceError

WANTED = "wanted cpu, cuda, cuda:N, webgpu or auto"


def backends_of(device: str, compute: str = "auto") -> list[Backend]:
    """The devices, in order of preference, that compute beside the CPU; it runs what they lack.

    cpu     none
    cuda    the NVIDIA card of this number, the first one without a number
    webgpu  the GPU that the system prefers, through Vulkan, Metal or Direct3D 12
    auto    the first card that can be used, if there is one

    compute: as for pyggml.load; unless it is "f32", a card multiplies by weights in bfloat16, and
    webgpu rounds weights to float16, but computes in float32.
    Raises ConfigError for another word, and DeviceError, which names what is missing, for a device
    that cannot be used.
    """
    name, colon, number = device.partition(":")
    known = name in ("cpu", "cuda", "webgpu", "auto")
    if not known or (colon and (name != "cuda" or not number.isdigit())):
        raise ConfigError([("device", f"is {device!r}, {WANTED}")])
    if name == "cpu":
        return []
    if name == "webgpu":
        from pyggml.backends.webgpu import open_webgpu

        return [open_webgpu("f32" if compute == "f32" else "f16")]
    from pyggml.backends.cuda import open_cuda

    rounding: Literal["f32", "bf16"] = "f32" if compute == "f32" else "bf16"
    try:
        return [open_cuda(int(number) if number else None, rounding)]
    except DeviceError:
        if name == "auto":
            return []
        raise
