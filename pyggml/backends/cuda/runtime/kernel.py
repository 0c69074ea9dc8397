"""How the card computes an op: `CudaKernel`, and the `CudaSite` that it is bound to."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np

from pyggml.backends.cuda.runtime.slabs import MemoryPlace
from pyggml.backends.kit import kernels
from pyggml.backends.kit.faults import Faults
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Op, Sample, Spec
from pyggml.graph.tensor import Tensor
from pyggml.ops.layout.cpy import leaf_of

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


_NO_GRAD = NoGrad("a device's own ops enter a graph that has its gradients")


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
    grad: NoGrad = _NO_GRAD

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


@cache
def bf16_op(op: Op, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    """The op as a card has it where numbers are rounded: sources `reads` may be BF16 in place of
    F32, and of its result and those that it saves, `writes` are."""

    def in_f32(src: Sequence[Tensor]) -> list[Tensor]:
        is_half = [i in reads and s.dtype is BF16 for i, s in enumerate(src)]
        return [Tensor(s.shape, F32) if half else s for s, half in zip(src, is_half, strict=True)]

    def spec(*src: Tensor, **params: Any) -> Spec:
        plain = op.spec(*in_f32(src), **params)
        return replace(plain, dtype=BF16) if 0 in writes else plain

    def saved(*src: Tensor, **params: Any) -> tuple[Spec, ...]:
        plain = op.saved(*in_f32(src), **params)
        return tuple(replace(s, dtype=BF16) if i in writes else s for i, s in enumerate(plain, 1))

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for sample in op.samples(rng):
            arrays = [leaf_of(a, "BF16") if i in reads else a for i, a in enumerate(sample.arrays)]
            yield replace(sample, arrays=tuple(arrays))

    return replace(op, spec=spec, saved=saved, samples=samples, grad=_NO_GRAD, halves=False)
