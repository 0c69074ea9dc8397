"""Tensor: a node of the graph.

Building a tensor computes nothing: it fixes a shape, a type and where the numbers will come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, DType
from pyggml.sizes import round_up

if TYPE_CHECKING:
    from pyggml.graph.op import Op

Shape = tuple[int, ...]
MAX_AXES = 4  # GGML_MAX_DIMS
_LINE = 64  # bytes

_BY_NUMPY = {d.numpy: d for d in (F32, F16, F64, I8, I16, I32, I64, BF16)}


@dataclass(eq=False, slots=True, weakref_slot=True)
class Tensor:
    """A leaf (weight, input, constant: `op` is None) or the result of `op` on `src`.

    `shape` is NumPy's, outermost axis first; `ne` and `nb` give ggml's order. `strides` are bytes.
    A view has a `base`, the tensor whose memory it looks into from byte `offset` on; a leaf with a
    base is a window of another leaf.
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
    data: Any = None  # its memory, as its backend addresses it; a leaf's is an array
    saved: tuple[Tensor, ...] = ()  # what the forward kernel leaves for the gradient rule

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
        return self.strides == expected or all(
            n == 1 or step == gapless
            for n, step, gapless in zip(self.shape, self.strides, expected, strict=True)
        )

    @property
    def is_view(self) -> bool:
        """Whether it only looks into its base: nothing runs."""
        return self.op is not None and self.op.is_view

    @property
    def is_write(self) -> bool:
        """Whether its kernel changes the memory of its base."""
        return self.op is not None and self.base is not None and not self.is_view

    @property
    def root(self) -> Tensor:
        """The tensor that owns this one's memory."""
        return self.base or self

    def named(self, name: str) -> Tensor:
        """Set the name that errors and listings show; returns self."""
        self.name = name
        return self

    def reading(self, src: tuple[Tensor, ...]) -> Tensor:
        """This node anew, of other sources with the same shapes, types and strides."""
        base = None if self.base is None else src[0].root
        new = Tensor(
            self.shape, self.dtype, self.op, src, self.params, self.name, self.strides, base,
            self.offset,
        )  # fmt: skip
        new.saved = tuple(s.reading((new,)) for s in self.saved)
        return new

    def __index__(self) -> int:
        """Refused, as are float(t) and t < 1: nothing is computed while a graph is built."""
        raise ShapeError(
            f"{self!r} is no number: its numbers are known when the graph has run; mul(x, t) and "
            "add(x, t) take tensors"
        )

    __float__ = __int__ = __index__

    def __lt__(self, other: object) -> bool:
        return bool(self.__index__())

    __le__ = __gt__ = __ge__ = __lt__

    def __repr__(self) -> str:
        made_by = self.op.name if self.op else "leaf"
        return f"<{self.name or made_by} {self.dtype}{list(self.shape)} = {made_by}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same line where IPython or Hypothesis would print every field of a dataclass."""
        printer.text(repr(self))


@lru_cache(4096)
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
    Raises ShapeError for what is no array, if its type has no ggml twin or is not what holds
    `dtype`, and if it has more than four axes or runs backwards along one.
    """
    if not isinstance(data, np.ndarray):
        raise ShapeError(
            f"{name or 'leaf'}: {data!r} is no NumPy array; numbers and lists become one by "
            "np.array(…, np.float32)"
        )
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


def fits_array(t: Tensor) -> bool:
    """Whether a leaf's array on the host, if it has one, has its shape, type and strides."""
    if not isinstance(t.data, np.ndarray):
        return True
    shape, strides = t.shape, t.strides
    if t.dtype.quantised:
        shape, strides = (*shape[:-1], t.dtype.row_bytes(shape[-1])), (*strides[:-1], 1)
    return (t.data.dtype, t.data.shape, t.data.strides) == (t.dtype.numpy, shape, strides)


def as_leaf(a: np.ndarray | Tensor) -> Tensor:
    """A fresh F32, I32 or, of int8 and float16, I8 and F16 leaf with the values of an array; a
    Tensor is returned as it is."""
    if isinstance(a, Tensor):
        return a
    kind = np.float32 if a.dtype.kind == "f" else np.int32
    return leaf(np.array(a, a.dtype if a.dtype in (np.int8, np.float16) else kind))


def zeros(shape: Shape, dtype: DType = F32, name: str = "") -> Tensor:
    """A leaf over fresh zeroed memory: an input to fill, a cache, a gradient accumulator."""
    held = (*shape[:-1], dtype.row_bytes(shape[-1])) if dtype.quantised else shape
    return leaf(np.zeros(held, dtype.numpy), name, dtype)


def put_together(*leaves: Tensor) -> None:
    """Make leaves windows of one new leaf, so that a device gets them all in one copy.

    They keep their numbers. No node may look into them yet.
    """
    *starts, n = accumulate((round_up(t.n_bytes, _LINE) for t in leaves), initial=0)
    whole = zeros((n,), I8, " and ".join(t.name for t in leaves))
    for t, start in zip(leaves, starts, strict=True):
        data = whole.data[start : start + t.n_bytes].view(t.data.dtype).reshape(t.data.shape)
        data[...] = t.data
        t.base, t.offset, t.data = whole, start, data


def window(of: Tensor, first: int, shape: Shape, name: str = "") -> Tensor:
    """A leaf over a part of another leaf's memory, which is flat: from its number `first` on."""
    data = of.data[first : first + prod(shape)].reshape(shape)
    return Tensor(shape, of.dtype, name=name, base=of, offset=first * of.strides[0], data=data)
