"""Tensor: a node of the graph. Op: everything there is to know of one operation.

Building a tensor computes nothing: it fixes a shape, a type and where the numbers will come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from math import prod
from typing import Any, Literal

import numpy as np

from pyggml.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, DType
from pyggml.errors import ShapeError
from pyggml.ggml_enums import GGMLGLUOp, GGMLOp, GGMLUnaryOp

Shape = tuple[int, ...]
MAX_AXES = 4  # GGML_MAX_DIMS

_places = count()


def next_place() -> int:
    """A place behind all nodes that have been made."""
    return next(_places)


_BY_NUMPY = {d.numpy: d for d in (F32, F16, F64, I8, I16, I32, I64, BF16)}


@dataclass(eq=False, slots=True)
class Tensor:
    """A leaf (weight, input, constant: `op` is None) or the result of `op` on `src`.

    `shape` is NumPy's, outermost axis first; `ne` and `nb` give ggml's order. `strides` are bytes.
    A view has a `base`, the tensor whose memory it looks into from byte `offset` on. Nodes run in
    the order of their `place`, which is that in which they were made.
    """

    shape: Shape
    dtype: DType
    op: Op | None = None
    src: tuple[Tensor, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    strides: Shape = ()
    base: Tensor | None = None
    offset: int = 0
    data: np.ndarray | None = None
    saved: tuple[Tensor, ...] = ()  # what the forward kernel leaves for the gradient rule
    boundary: bool = False  # between two layers: always kept for the backward pass
    stand_in: Tensor | None = None  # a rounded copy, which the backward pass reads instead
    place: int = field(default_factory=next_place, init=False)

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_AXES or min(self.shape, default=0) < 0:
            made_by = self.name or (self.op.name if self.op else "leaf")
            raise ShapeError(
                f"{made_by}: a shape of {list(self.shape)}, wanted at most {MAX_AXES} axes, "
                "none below 0"
            )
        if not self.strides:
            self.strides = contiguous_strides(self.shape, self.dtype)

    @property
    def ne(self) -> Shape:
        """Sizes in ggml's order, innermost first, padded with ones to four."""
        return (*reversed(self.shape), *(1,) * (4 - len(self.shape)))

    @property
    def nb(self) -> Shape:
        """Byte strides in ggml's order, matching `ne`."""
        outer = self.strides[0] * self.shape[0] if self.shape else self.dtype.block_bytes
        return (*reversed(self.strides), *(outer,) * (4 - len(self.shape)))

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of a contiguous tensor of this shape and type."""
        if not self.shape:
            return self.dtype.block_bytes
        return prod(self.shape[:-1]) * self.dtype.row_bytes(self.shape[-1])

    @property
    def is_contiguous(self) -> bool:
        expected = contiguous_strides(self.shape, self.dtype)
        return all(
            n == 1 or found == wanted
            for n, found, wanted in zip(self.shape, self.strides, expected, strict=True)
        )

    @property
    def is_view(self) -> bool:
        """Whether it only looks into its base: nothing runs."""
        return self.op is not None and self.op.memory is Memory.VIEW

    @property
    def root(self) -> Tensor:
        """The tensor that owns this one's memory."""
        return self.base or self

    def named(self, name: str) -> Tensor:
        """Set the name that errors and listings show; returns self."""
        self.name = name
        return self

    def __repr__(self) -> str:
        made_by = self.op.name if self.op else "leaf"
        return f"<{self.name or made_by} {self.dtype}{list(self.shape)} = {made_by}>"


def contiguous_strides(shape: Shape, dtype: DType) -> Shape:
    """Byte strides, outermost first, of a gapless tensor; a quantised row's step is its block."""
    strides = [dtype.block_bytes] * len(shape)
    if len(shape) > 1:
        strides[-2] = dtype.row_bytes(shape[-1])
    for i in range(len(shape) - 3, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def leaf(data: np.ndarray, name: str = "", dtype: DType | None = None) -> Tensor:
    """A tensor over an existing array, which is not copied.

    For a quantised `dtype`, data is uint8 of shape (*shape[:-1], row_bytes). Strides are kept.
    Raises ShapeError if the array's type has no ggml twin, or is not what holds `dtype`, or if the
    array has more than four axes or runs backwards along one.
    """
    if dtype is None:
        dtype = _BY_NUMPY.get(data.dtype)
        if dtype is None:
            raise ShapeError(f"{name or 'array'}: NumPy type {data.dtype} has no ggml type")
    if data.dtype != dtype.numpy:
        raise ShapeError(f"{name or 'array'}: {data.dtype} holds no {dtype}, wanted {dtype.numpy}")
    if min(data.strides, default=0) < 0:  # a view is sought from the first element on
        raise ShapeError(f"{name or 'array'}: strides are {data.strides}, wanted none below 0")
    if not dtype.quantised:
        return Tensor(data.shape, dtype, name=name, data=data, strides=data.strides)
    n = data.shape[-1] // dtype.block_bytes * dtype.block
    strides = (*data.strides[:-1], dtype.block_bytes)
    return Tensor((*data.shape[:-1], n), dtype, name=name, data=data, strides=strides)


def zeros(shape: Shape, dtype: DType = F32, name: str = "") -> Tensor:
    """A leaf over fresh zeroed memory: an input to fill, a cache, a gradient accumulator."""
    return leaf(np.zeros(shape, dtype.numpy), name, dtype)


# -- ops ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoGrad:
    """Stands where a gradient rule would be, and says why there is none."""

    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments that an op must accept, as arrays or ready leaves, for tests and benchmarks."""

    arrays: tuple[np.ndarray | Tensor, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a shape rule answers. `strides` and `offset` (bytes) are set by view ops only."""

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


Compute = Literal["f32", "bf16", "int8"]


@dataclass(frozen=True, slots=True)
class Site:
    """One node's memory, as a backend hands it to the op's `run`; arrays have the node's shapes."""

    node: Tensor
    out: np.ndarray
    src: tuple[np.ndarray, ...]
    saved: tuple[np.ndarray, ...]
    work: np.ndarray  # uint8 scratch of `needs.work` bytes, 64-byte aligned
    compute: Compute  # how packed weights are multiplied, see pyggml.gemm
    shared: np.ndarray | None = None  # scratch that several nodes read, see Needs.shared
    fills_shared: bool = False  # whether this node is the first of them

    @property
    def scalars(self) -> tuple[Any, ...]:
        """The node's parameters in order of declaration, floats as float32 for the kernels."""
        values = self.node.params.values()
        return tuple(np.float32(v) if isinstance(v, float) else v for v in values)


Call = tuple[Callable[..., None], tuple[Any, ...]]
GradRule = Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]


def _nothing_saved(*src: Tensor, **params: Any) -> tuple[Spec, ...]:
    return ()


def _no_work(node: Tensor) -> int:
    return 0


def _nothing_shared(node: Tensor) -> tuple[int, str]:
    return 0, ""


@dataclass(frozen=True, slots=True)
class Needs:
    """What an op asks of the planner beyond its result.

    strided   the kernel walks its sources by their strides; otherwise a `cont` is put before any
              source with gaps
    saved     (*src, **params) -> what else the forward kernel writes, for the gradient rule
    work      (node) -> bytes of scratch
    shared    (node) -> bytes of scratch that the kernel makes of its last source alone, 0 if none,
              and a word for what it makes; nodes with the same source, function and word share it
    costly    far more than a few operations for each number read or written
    """

    strided: bool = False
    saved: Callable[..., tuple[Spec, ...]] = _nothing_saved
    work: Callable[[Tensor], int] = _no_work
    shared: Callable[[Tensor], tuple[int, str]] = _nothing_shared
    costly: bool = False

    @property
    def cheap(self) -> bool:
        """Whether to compute a result again for the backward pass costs less than to keep it."""
        return not self.costly and self.work is _no_work and self.saved is _nothing_saved


PLAIN = Needs()
STRIDED = Needs(strided=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Everything the engine, the planner and the tests need to know of one op.

    spec      (*src tensors, **params) -> Spec; raises ShapeError if they do not fit
    run       (Site) -> (kernel, arguments), called once when a plan is bound to memory
    ref       the same in NumPy float64: (*arrays, **params) -> array
    grad      (node, dy) -> one gradient tensor or None for each source
    samples   (rng) -> Sample iterator
    fuses     the ops that its kernel stands for, if it is a fusion
    """

    name: str
    ggml: GGMLOp | GGMLUnaryOp | GGMLGLUOp
    spec: Callable[..., Spec]
    run: Callable[[Site], Call]
    ref: Callable[..., np.ndarray]
    grad: GradRule | NoGrad
    samples: Callable[[np.random.Generator], Iterator[Sample]]
    memory: Memory
    needs: Needs
    fuses: tuple[str, ...] = ()

    def __call__(self, *src: Tensor, **params: Any) -> Tensor:
        """The node that applies this op; nothing is computed."""
        if not self.needs.strided:
            src = tuple(s if s.is_contiguous else OPS["cont"](s) for s in src)
        spec = self.spec(*src, **params)
        node = Tensor(spec.shape, spec.dtype, self, src, params, strides=spec.strides)
        if self.memory in (Memory.VIEW, Memory.ALIAS):
            node.base = src[0].root
            node.offset = src[0].offset + spec.offset
        node.saved = tuple(
            Tensor(s.shape, s.dtype, SAVED, (node,)) for s in self.needs.saved(*src, **params)
        )
        return node


OPS: dict[str, Op] = {}


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
    run=_never,
    ref=_never,
    grad=NoGrad("what a forward kernel leaves for its own gradient has none itself"),
    samples=lambda rng: iter(()),
    memory=Memory.FRESH,
    needs=PLAIN,
)

# The op of what a plan adds: scratch that several nodes share (`Plan.shared`), made by its source.
SHARED = replace(
    SAVED, name="shared", grad=NoGrad("scratch that a plan adds is no part of the function")
)

# -- how kernels see arrays ---------------------------------------------------------------------


def flat(kernel: Callable[..., None]) -> Callable[[Site], Call]:
    """Call kernel(out, *src, *params) with every array as one axis."""

    def run(site: Site) -> Call:
        arrays = (site.out, *site.src)
        return kernel, (*(a.reshape(-1) for a in arrays), *site.scalars)

    return run


def rows(kernel: Callable[..., None]) -> Callable[[Site], Call]:
    """Call kernel(out, *src, *saved, *params) with every array as (n_rows, n)."""

    def run(site: Site) -> Call:
        arrays = (site.out, *site.src, *site.saved)
        return kernel, (*(as_rows(a) for a in arrays), *site.scalars)

    return run


def four(kernel: Callable[..., None]) -> Callable[[Site], Call]:
    """Call kernel(out, *src, *params) with every array padded with leading ones to four axes."""

    def run(site: Site) -> Call:
        arrays = (site.out, *site.src)
        return kernel, (*(as_four(a) for a in arrays), *site.scalars)

    return run


def as_rows(a: np.ndarray) -> np.ndarray:
    """(..., n) as (n_rows, n), no copy; a scalar as (1, 1)."""
    return a.reshape(-1, a.shape[-1]) if a.ndim else a.reshape(1, 1)


def as_four(a: np.ndarray) -> np.ndarray:
    """Leading axes of one element until there are four, no copy."""
    return a[(None,) * (4 - a.ndim)]
