"""How the card computes an op: `Kernel`, and the `Site` that it is bound to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pyggml.backends.kit import kernels
from pyggml.backends.kit.faults import Faults
from pyggml.graph.call import Call
from pyggml.graph.op import SAVED, Memory, NoGrad, Op
from pyggml.graph.tensor import Tensor

Compute = Literal["f32", "bf16"]
ALIGNMENT = 64  # bytes: of scratch, and of each array in it


@dataclass(frozen=True, slots=True)
class Site(kernels.Site[Any]):
    """The memory of one node, as a kernel's `bind` gets it.

    Arrays lie on the card and have one axis: the elements from the tensor's first to its last,
    gaps included. Quantised types and scratch are uint8, BF16 is uint16. Scratch is aligned to
    ALIGNMENT.
    """

    shared: Any  # scratch that several nodes read, see Kernel.shared; None if there is none
    fills_shared: bool  # whether this node is the first of them
    compute: Compute  # how products with weights round
    stream: Any  # all launches go here
    faults: Faults  # a kernel notes one by `cuda.atomic.max(cell, 0, number)`
    constant: Callable[[np.ndarray], Any]  # a small array of the host's, copied to the card
    # (index of a source that is a leaf, bytes) -> (memory that lasts as long as the leaf's own,
    # whether it is new)
    lasting: Callable[[int, int], tuple[Any, bool]]


class BoundCall(Call):
    """The call of a node, with its memory."""

    __slots__ = ("site",)

    def __init__(self, call: Call, site: Site) -> None:
        super().__init__(call.kernel, *call.arguments)
        self.site = site


def nothing_lasts(_node: Tensor) -> tuple[int, int] | None:
    """Of a kernel that takes no memory beside a leaf's."""
    return None


@dataclass(frozen=True, slots=True)
class Kernel(kernels.Kernel[Site, Call, Compute]):
    """The card's way to compute an op: `bind` returns a Call, see launches.py.

    lasting   (node) -> (index of a source that is a leaf, bytes) as it asks `Site.lasting` for;
              None if it does not
    """

    lasting: Callable[[Tensor], tuple[int, int] | None] = nothing_lasts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnOp(Op):
    """An op that no other device has; it comes with its kernel.

    results   (*arrays, **params) -> what `ref` gives, then what the op saves, in NumPy float64
    """

    kernel: Kernel
    results: Callable[..., Iterable[np.ndarray]]


def is_of(t: Tensor, *names: str) -> bool:
    """Whether t is the result of an op of one of these names."""
    return t.op is not None and t.op.name in names


def own_op(
    name: str,
    kernel: Kernel,
    results: Callable[..., Iterable[np.ndarray]],
    memory: Memory = Memory.FRESH,
) -> OwnOp:
    """An op that passes put into finished graphs: nothing else makes nodes of it."""

    def ref(*arrays: np.ndarray, **params: Any) -> np.ndarray:
        return next(iter(results(*arrays, **params)))

    fields = {f: getattr(SAVED, f) for f in ("ggml", "spec", "samples", "refuses")}
    reason = NoGrad("a device's own ops enter a graph that has its gradients")
    return OwnOp(
        name=name, ref=ref, grad=reason, memory=memory, kernel=kernel, results=results, **fields
    )
