"""How the device computes an op: `Kernel`, and the `Site` that it is bound to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyggml.backends.webgpu.shader import Dispatch, Shaders, View
from pyggml.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Site:
    """The memory of one node, as a kernel's `bind` gets it. `scratch` is a range of floats."""

    node: Tensor
    out: View
    src: tuple[View, ...]
    saved: tuple[View, ...]
    scratch: View
    shaders: Shaders


def _nothing_lacks(node: Tensor) -> str | None:
    return None


def _no_scratch(node: Tensor, limit: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """The device's way to compute an op.

    bind      (Site) -> its dispatches, in their order
    lacks     (node) -> what is missing to compute it, in a few words; None if nothing
    scratch   (node, limit) -> bytes of scratch; limit: the most bytes of one binding
    tiled     numbers of sources that may be larger than the limit
    """

    bind: Callable[[Site], Sequence[Dispatch]]
    lacks: Callable[[Tensor], str | None] = _nothing_lacks
    scratch: Callable[[Tensor, int], int] = _no_scratch
    tiled: tuple[int, ...] = ()
