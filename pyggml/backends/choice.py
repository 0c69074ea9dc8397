"""The devices that a word names: cpu, cuda, cuda:1, auto."""

from __future__ import annotations

from typing import Literal

from pyggml.backends.base import Backend
from pyggml.errors import ConfigError, DeviceError

WANTED = "wanted cpu, cuda, cuda:N or auto"


def backends_of(device: str, compute: str = "auto") -> list[Backend]:
    """The devices, in order of preference, that compute beside the CPU; it runs what they lack.

    cpu     none
    cuda    the NVIDIA card of this number, the first one without a number
    auto    the first card that can be used, if there is one

    compute: as for pyggml.load; a card multiplies by weights in bfloat16 unless it is "f32".
    Raises ConfigError for another word, and DeviceError, which names what is missing, for a card
    that cannot be used.
    """
    name, colon, number = device.partition(":")
    if name not in ("cpu", "cuda", "auto") or (colon and (name != "cuda" or not number.isdigit())):
        raise ConfigError([("device", f"is {device!r}, {WANTED}")])
    if name == "cpu":
        return []
    from pyggml.backends.cuda import open_cuda

    rounding: Literal["f32", "bf16"] = "f32" if compute == "f32" else "bf16"
    try:
        return [open_cuda(int(number) if number else None, rounding)]
    except DeviceError:
        if name == "auto":
            return []
        raise
