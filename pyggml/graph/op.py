"""Op: the meaning of an operation, the same on every device. Kernels belong to the backends."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.formula import Formula
from pyggml.graph.dtypes import F32, HALVES, DType
from pyggml.graph.ggml_enums import GGMLGLUOp, GGMLOp, GGMLUnaryOp
from pyggml.graph.tensor import Shape, Tensor


@dataclass(frozen=True, slots=True)
class NoGrad:
    """Instead of a gradient rule: the reason why there is none."""

    reason: str


class Detached(NoGrad):
    """Instead of a gradient rule: the result counts as a constant, so that none is missing."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments that an op must accept, as arrays or leaves, for tests and benchmarks."""

    arrays: tuple[np.ndarray | Tensor, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spec:
    """The result of a shape rule. `strides` and `offset` (bytes) are set by view ops only."""

    shape: Shape
    dtype: DType = F32
    strides: Shape = ()
    offset: int = 0


class Memory(Enum):
    """Where an op's result lives."""

    FRESH = "in memory of its own"
    INPLACE = "in memory of its own, or in that of any dying source of the same layout"
    INPLACE_FIRST = "in memory of its own, or in that of its first source if that dies here"
    VIEW = "in its first source's memory; nothing runs"
    ALIAS = "in its first source's memory, which the kernel changes"


Refused = Mapping[str, tuple[Any, ...]]
NO_SETTINGS: Refused = MappingProxyType({})

GradRule = Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]


_NUMBERS = "settings are fixed when the graph is built; mul(x, t) and add(x, t) take tensors"


def _nothing_saved(*src: Tensor, **params: Any) -> tuple[Spec, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """The meaning of an operation: all that the engine, the planner and the tests need to know.

    spec      (*src tensors, **params) -> Spec; raises ShapeError if they do not fit
    ref       what it computes, in NumPy float64: (*arrays, **params) -> array
    grad      (node, dy) -> one gradient tensor or None for each source
    samples   (rng) -> Sample iterator
    refuses   for each setting (key of params) values that `spec` must refuse; () if none is wrong
    memory    where the result lives
    strided   kernels walk the sources by their strides; otherwise a `cont` is put before any
              source with gaps
    saved     (*src, **params) -> what else a kernel writes, for the gradient rule
    costly    many operations for each number read or written
    fuses     the ops that it replaces, if it is a fusion
    formula   what every device makes its kernel of, if each number of the result is computed of one
              number of each source
    changes   positions of further sources, leaves, that the kernel changes
    shares    several may write side by side into one tensor: each result shows what all wrote
    made_of   (*src, **params) -> the same result of other ops, of which a schedule makes the node
    halves    also takes F16 and BF16: they are copied to F32 first, and the result is copied to the
              type of the first source
    """

    name: str
    ggml: GGMLOp | GGMLUnaryOp | GGMLGLUOp = GGMLOp.CUSTOM
    spec: Callable[..., Spec]
    ref: Callable[..., np.ndarray]
    grad: GradRule | NoGrad
    samples: Callable[[np.random.Generator], Iterator[Sample]]
    refuses: Refused = field(default_factory=lambda: NO_SETTINGS)
    memory: Memory = Memory.FRESH
    strided: bool = False
    saved: Callable[..., tuple[Spec, ...]] = _nothing_saved
    costly: bool = False
    fuses: tuple[str, ...] = ()
    formula: Formula | None = None
    changes: tuple[int, ...] = ()
    shares: bool = False
    made_of: Callable[..., Tensor] | None = None
    halves: bool = False
    is_view: bool = field(init=False)  # whether nothing runs: every walk over a graph asks this

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_view", self.memory is Memory.VIEW)

    @property
    def cheap(self) -> bool:
        """Whether computing a result again for the backward pass costs less than keeping it."""
        return not self.costly and self.saved is _nothing_saved

    def __call__(self, *src: Tensor, **params: Any) -> Tensor:
        """The node that applies this op; nothing is computed."""
        # Loops: a graph is built of thousands of calls, and generators are slower.
        gapless, widens = True, False
        for s in src:
            if not isinstance(s, Tensor):
                raise ShapeError(
                    f"{self.name}: {s!r} is no Tensor: wanted leaf(array) for numbers, "
                    "scale(x, s) for a product with one, and apply(op, …) for Values"
                )
            gapless = gapless and (self.strided or s.is_contiguous)
            widens = widens or (self.halves and s.dtype in HALVES)
        for name, value in params.items():
            if isinstance(value, Tensor):
                raise ShapeError(f"{self.name}: {name} is {value!r}, wanted a number: {_NUMBERS}")
        if widens:
            y = self(*map(widen, src), **params)
            return y if src[0].dtype is F32 else OPS["cpy"](y, to=src[0].dtype.name)
        if not gapless:
            src = tuple(s if s.is_contiguous else OPS["cont"](s) for s in src)
        spec = self.spec(*src, **params)
        node = Tensor(spec.shape, spec.dtype, self, src, params, strides=spec.strides)
        if self.memory in (Memory.VIEW, Memory.ALIAS):
            node.base = src[0].root
            node.offset = src[0].offset + spec.offset
        if self.saved is not _nothing_saved:
            node.saved = tuple(
                Tensor(s.shape, s.dtype, SAVED, (node,)) for s in self.saved(*src, **params)
            )
        return node


OPS: dict[str, Op] = {}


def widen(x: Tensor) -> Tensor:
    """x as F32 if it is F16 or BF16, by a copy that is exact; else x."""
    return OPS["cpy"](x, to="F32") if x.dtype in HALVES else x


def over_first(node: Tensor) -> Tensor:
    """A node whose result is written over its first source, of which it becomes a window."""
    node.base, node.offset = node.src[0].root, node.src[0].offset
    return node


def op(**fields: Any) -> Op:
    """Declare an op and enter it in OPS; a forgotten field is a TypeError."""
    new = Op(**fields)
    if new.name in OPS:
        raise ValueError(f"op {new.name!r} is declared twice")
    OPS[new.name] = new
    return new


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a saved tensor is written by the node it belongs to")


# The op of `Tensor.saved`: a second result, made when its only source is made.
SAVED = Op(
    name="saved",
    ggml=GGMLOp.NONE,
    spec=_never,
    ref=_never,
    grad=NoGrad("what a forward kernel leaves for its own gradient has none itself"),
    samples=lambda rng: iter(()),
)

# Ops that a schedule adds where tensors go from one device to another: a copy of another device's
# numbers; one of a host's weight (`leaf` of its params), made in every run anew; a view that gives
# a copy another order of axes or keeps its source alive; one whose numbers the host gets; and the
# copy that these come back to (`returned` of its params).
COPIED, STREAMED, SEEN, SENT, RETURNED = (
    replace(SAVED, name=name, memory=memory, grad=NoGrad("a schedule is made of gradients too"))
    for name, memory in (
        ("copied", Memory.FRESH),
        ("streamed", Memory.FRESH),
        ("seen", Memory.VIEW),
        ("sent", Memory.VIEW),
        ("returned", Memory.FRESH),
    )
)

# The op of scratch that several nodes share, which a plan adds (`Plan.shared`).
SHARED = replace(
    SAVED, name="shared", grad=NoGrad("scratch that a plan adds is no part of the function")
)


def has_kernel(node: Tensor) -> bool:
    """Whether a kernel computes the node: neither a view nor written by another node's kernel."""
    op = node.op
    return not (op is None or op.is_view or op in (SAVED, COPIED, STREAMED, RETURNED))


def computes(node: Tensor) -> bool:
    """Whether a kernel runs for the node: it has one, and there is a number to compute."""
    return has_kernel(node) and (0 not in node.shape or any(t.n_elements for t in node.saved))


def changed_by(node: Tensor) -> list[Tensor]:
    """The owners of all memory that a node's kernel changes, other than its own result."""
    further = node.op.changes if node.op is not None else ()
    return [*([node.root] if node.is_write else []), *(node.src[i].root for i in further)]
