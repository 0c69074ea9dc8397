"""Matrix products with a packed weight or with float32 of any strides, bound as kernel calls.

mul_mat    y (+)= x · Wᵀ      out_prod    dx (+)= dy · W      strided    c (+)= a · bᵀ

`compute` is how the numbers of a packed weight are multiplied: "f32" exactly, "bf16" after rounding
both sides to bfloat16, with sums in float32, "int8" after rounding both to bytes where weights are
whole numbers, else as FLOATS says. Float32 weights are always multiplied exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml import threads
from pyggml._isa import CHOSEN
from pyggml.backends.cpu import Compute
from pyggml.call import Call
from pyggml.dtypes import F32, DType
from pyggml.gemm import dots, few, frames, int8, panels, product, thin, twin
from pyggml.gemm import strided as strides
from pyggml.quants import UNPACK

__all__ = [
    "CHOSEN",
    "FASTEST",
    "Packing",
    "Weight",
    "mul_mat",
    "out_prod",
    "packed_bytes",
    "strided",
    "work_bytes",
]

_NUMPY = CHOSEN.name == "numpy"
FLOATS: Compute = "bf16" if CHOSEN.bf16 else "f32"  # the fastest products of floats here
FASTEST: Compute = "int8" if CHOSEN.vnni else FLOATS  # what "auto" stands for on this machine


def work_bytes(n_rows: int, depth: int, n_batches: int = 1) -> int:
    """Scratch of one product: the packed (n_rows, depth) side and every thread's tile."""
    packed = max(panels.packed_slots(n_rows, depth, pairs) for pairs in (False, True)) * n_batches
    packed = max(packed, thin.packed_floats(thin.WIDEST, depth))
    return 4 * (_rounded(packed) + threads.most() * frames.SCRATCH)


def _rounded(floats: int) -> int:
    """Floats up to a whole number of cache lines."""
    return -(-floats // 16) * 16


def _scratch(work: np.ndarray, packed: int) -> tuple[np.ndarray, np.ndarray]:
    floats = work.view(np.float32)
    n_threads = threads.most()
    start = _rounded(packed)
    tiles = floats[start : start + n_threads * frames.SCRATCH].reshape(n_threads, frames.SCRATCH)
    return floats[:packed], tiles


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix (N, row of bytes or numbers) of any type, and how it is to be multiplied."""

    data: np.ndarray
    dtype: DType
    compute: Compute

    @property
    def pairs(self) -> bool:
        """Whether products of floats round to bfloat16."""
        return rounds(self.compute) and self.dtype is not F32

    def in_bytes(self, depth: int) -> bool:
        """Whether mul_mat with rows of this length multiplies bytes."""
        return self.compute == "int8" and int8.takes(self.dtype, depth)

    def rows_in_bytes(self, n_rows: int, depth: int) -> bool:
        """Whether out_prod does."""
        return self.compute == "int8" and int8.takes_rows(self.dtype, n_rows, depth)

    @property
    def place(self) -> tuple[int, int]:
        """Address and bytes of a row."""
        return self.data.ctypes.data, self.data.strides[0]


def rounds(compute: Compute) -> bool:
    """Whether products of floats round to bfloat16 when packed weights are multiplied so."""
    return (FLOATS if compute == "int8" else compute) == "bf16"


@dataclass(frozen=True, slots=True)
class Packing:
    """Where x is packed for several products (`packed_bytes` of memory); the first does it."""

    memory: np.ndarray
    done: bool


def packed_bytes(n_rows: int, depth: int, kind: DType) -> tuple[int, str]:
    """Memory of a Packing for x (n_rows, depth) and weights of this type, 0 if x is not packed; and
    a word for the form it may have, whatever is computed with."""
    if n_rows <= few.FEW or kind is F32:
        return 0, ""
    size = 4 * max(panels.packed_slots(n_rows, depth, pairs) for pairs in (False, True))
    return size, "bytes" if int8.takes(kind, depth) else "floats"


def _packed_slots(n_rows: int, depth: int, pairs: bool, in_bytes: bool) -> int:
    if in_bytes:
        return int8.packed_slots(n_rows, depth)
    return panels.packed_slots(n_rows, depth, pairs)


def mul_mat(
    y: np.ndarray, x: np.ndarray, w: Weight, work: np.ndarray, accumulate: bool,
    packing: Packing | None = None,
) -> Call:  # fmt: skip
    """y (T, N) (+)= x (T, K) · wᵀ; y contiguous, x with whole rows."""
    shape = (x.shape[0], w.data.shape[0], x.shape[1])
    if _is_thin(w, shape[1]) and shape[0] > few.FEW:
        return _thin_rows(y, x, w.data, work, accumulate)
    in_bytes = w.in_bytes(shape[2])
    if _NUMPY:
        return Call(twin.forward, y, x, w.data, w.dtype, accumulate, w.pairs, in_bytes)
    sides = y.reshape(-1), _flat(x), x.strides[0] // 4
    if shape[0] <= few.FEW:
        kind = dots.kind_of_rows(w.dtype, shape[2])
        in_bytes = in_bytes and shape[2] <= few.LONGEST_INTS
        weight = _blocks(w, kind < 0)  # if rows are multiplied packed there is none to compile
        tiles = _scratch(work, 0)[1]
        return few.forward(*sides, weight, kind, shape, accumulate, in_bytes, tiles)
    size = _packed_slots(x.shape[0], x.shape[1], w.pairs, in_bytes)
    packed, tiles = _scratch(work, size)
    if packing is not None:
        packed = packing.memory.view(np.float32)[:size]
    done = packing is not None and packing.done
    if in_bytes:
        w_at = *w.place, w.dtype
        return int8.forward(*sides, w_at, shape, accumulate, packed, tiles, done)
    return product.forward(*sides, _blocks(w), shape, accumulate, w.pairs, packed, tiles, done)


def out_prod(dx: np.ndarray, dy: np.ndarray, w: Weight, work: np.ndarray, accumulate: bool) -> Call:
    """dx (T, K) (+)= dy (T, N) · w; dx contiguous, dy with whole rows."""
    shape = (dy.shape[0], w.data.shape[0], dx.shape[1])
    if _is_thin(w, shape[2]):
        return _thin_rows(dx, dy, w.data.T, work, accumulate)
    in_bytes = w.rows_in_bytes(*shape[1:])
    if _NUMPY:
        return Call(twin.backward, dx, dy, w.data, w.dtype, accumulate, w.pairs, in_bytes)
    packed, tiles = _scratch(work, _packed_slots(dy.shape[0], dy.shape[1], w.pairs, in_bytes))
    sides = dx.reshape(-1), _flat(dy), dy.strides[0] // 4
    if in_bytes:
        return int8.backward(*sides, (*w.place, w.dtype), shape, accumulate, packed, tiles)
    return product.backward(*sides, _blocks(w), shape, accumulate, w.pairs, packed, tiles)


def _blocks(w: Weight, unpacked: bool = True) -> frames.BlockMatrix:
    """The weight as the kernels take it."""
    code = UNPACK[w.dtype.name].address if unpacked else 0
    return frames.BlockMatrix(*w.place, code, w.dtype.block, w.dtype.block_bytes)


def _is_thin(w: Weight, n: int) -> bool:
    """Whether a float32 matrix with a side of n serves as the thin side."""
    return n <= thin.WIDEST and w.data.dtype == np.float32 and not _NUMPY


def _thin_rows(
    c: np.ndarray, x: np.ndarray, a: np.ndarray, work: np.ndarray, accumulate: bool
) -> Call:
    """c (T, R) (+)= x (T, K) · a (R, K)ᵀ; a with any strides."""
    shape = (x.shape[0], a.shape[0], x.shape[1])
    sides = _flat(x), x.strides[0] // 4, _flat(a), (a.strides[0] // 4, a.strides[1] // 4)
    scratch = _scratch(work, thin.packed_floats(*shape[1:]))
    return thin.rows(c.reshape(-1), *sides, shape, accumulate, *scratch)


def _is_columns(a: np.ndarray) -> bool:
    """A matrix that lies column by column, each without gaps."""
    return a.strides[1] == 4


def _thin_outer(
    c: np.ndarray, few: np.ndarray, many: np.ndarray, work: np.ndarray, accumulate: bool,
    transposed: bool,
) -> Call:  # fmt: skip
    """c (+)= few (R, K) · many (N, K)ᵀ, or its transpose; many lies column by column."""
    shape = (few.shape[1], few.shape[0], many.shape[0])
    sides = (
        _flat(few),
        (few.strides[0] // 4, few.strides[1] // 4),
        _flat(many),
        many.strides[1] // 4,
    )
    scratch = _scratch(work, thin.packed_floats(shape[1], shape[0]))
    return thin.outer(c.reshape(-1), *sides, shape, accumulate, transposed, *scratch)


def strided(
    c: np.ndarray, a: np.ndarray, b: np.ndarray, work: np.ndarray, accumulate: bool
) -> Call:
    """c (B, M, N) (+)= a (B / i, M, K) · b (B / j, N, K)ᵀ; float32, c contiguous, a and b not.

    Batch n of c takes batch n // i of a and n // j of b, as ggml broadcasts.
    """
    if _NUMPY:
        return Call(twin.strided, c, a, b, accumulate)
    n_batches, n_rows, n_out = c.shape
    depth = a.shape[2]
    if n_batches == 1 and n_rows <= thin.WIDEST and _is_columns(b):
        return _thin_outer(c, a[0], b[0], work, accumulate, False)
    if n_batches == 1 and n_out <= thin.WIDEST and _is_columns(a):
        return _thin_outer(c, b[0], a[0], work, accumulate, True)
    repeats = (n_batches // a.shape[0], n_batches // b.shape[0])
    size = panels.packed_slots(n_rows, depth, False) * n_batches
    packed, tiles = _scratch(work, size)
    shape = (n_batches, n_rows, n_out, depth)
    flat = c.reshape(-1), _flat(a), _flat(b)
    return strides.strided(*flat, _steps(a), _steps(b), repeats, shape, accumulate, packed, tiles)


def _steps(a: np.ndarray) -> strides.Strides:
    """Strides of three axes in floats."""
    return strides.Strides(*(s // 4 for s in a.strides))


def _flat(a: np.ndarray) -> np.ndarray:
    """The memory from a's first to its last element as one contiguous axis."""
    last = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True))
    return np.lib.stride_tricks.as_strided(a, (last // 4 + 1,), (4,))
