"""How the card computes an op: `CudaKernel`, and the `CudaSite` that it is bound to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from pyggml.backends.cuda.runtime.slabs import MemoryPlace
from pyggml.backends.kit import kernels
from pyggml.backends.kit.faults import Faults
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Op
from pyggml.graph.tensor import Tensor
from pyggml.ops.in_bf16 import NO_GRAD

Compute = Literal["f32", "bf16"]
ALIGNMENT = 64  # bytes: of scratch, and of each array in it


@dataclass(frozen=True, slots=True)
class CudaSite(kernels.NodeSite[Any]):
    """The memory of one node, as a kernel's `bind` gets it.

    Arrays lie on the card and have one axis: the elements from the tensor's first to its last,
    gaps included. Quantised types and scratch are uint8, BF16 is uint16. Scratch is aligned to
    ALIGNMENT.
    """

    shared: Any  # scratch that several nodes read, see CudaKernel.shared; None if there is none
    fills_shared: bool  # whether this node is the first of them
    compute: Compute  # how products with weights round
    stream: Any  # all launches go here
    faults: Faults  # a kernel notes one by `cuda.atomic.max(cell, 0, number)`
    constant: Callable[[np.ndarray], Any]  # a small array of the host's, copied to the card
    # (index of a source that is a leaf, bytes, their place or None) -> (memory that lasts as long
    # as the leaf's own, whether it is new)
    lasting: Callable[[int, int, MemoryPlace | None], tuple[Any, bool]]
    once: Callable[[Call], None]  # a call that is made once, before the program first runs


class BoundCall(Call):
    """The call of a node, with its memory; or one whose steps say what they write."""

    __slots__ = ("site",)

    def __init__(self, call: Call, site: CudaSite | None = None) -> None:
        super().__init__(call.kernel, *call.arguments)
        self.site = site


def nothing_lasts(_node: Tensor) -> Iterable[tuple[int, int]]:
    """Of a kernel that takes no memory beside a leaf's."""
    return ()


@dataclass(frozen=True, slots=True)
class CudaKernel(kernels.DeviceKernel[CudaSite, Call, Compute]):
    """The card's way to compute an op: `bind` returns a Call, see launches.py.

    lasting   (node) -> (index of a source that is a leaf, bytes) each, as it asks
              `CudaSite.lasting` for
    """

    lasting: Callable[[Tensor], Iterable[tuple[int, int]]] = nothing_lasts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnOp(Op):
    """An op that no other device has: passes put it into finished graphs. It comes with its kernel.

    results   (*arrays, **params) -> what `ref` gives, then what the op saves, in NumPy float64
    """

    kernel: CudaKernel
    results: Callable[..., Iterable[np.ndarray]]
    ref: Callable[..., np.ndarray] = field(init=False)
    ggml: GGMLOp = GGMLOp.CUSTOM
    memory: Memory = Memory.FRESH
    grad: NoGrad = NO_GRAD

    def __post_init__(self) -> None:
        Op.__post_init__(self)
        object.__setattr__(self, "ref", partial(_first_result, self.results))


def _first_result(
    results: Callable[..., Iterable[np.ndarray]], *arrays: np.ndarray, **params: Any
) -> np.ndarray:
    return next(iter(results(*arrays, **params)))


OWN_OPS: dict[str, OwnOp] = {}


def own_op(**fields: Any) -> OwnOp:
    """Declare one and enter it in OWN_OPS."""
    new = OWN_OPS[fields["name"]] = OwnOp(**fields)
    return new


def is_of(t: Tensor, *names: str) -> bool:
    """Whether t is the result of an op of one of these names."""
    return t.op is not None and t.op.name in names


def again(node: Tensor, *src: Tensor, **changed: Any) -> Tensor:
    """The node once more, by its op, of other sources and with some settings changed."""
    assert node.op is not None
    return node.op(*src, **{**node.params, **changed})
