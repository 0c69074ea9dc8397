"""Whole tensors: rows of blocks ↔ rows of float32, on all threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pyggml import threads
from pyggml.errors import QuantError
from pyggml.graph.dtypes import DType, dtype
from pyggml.jit import JIT
from pyggml.quants.base import NoFit, NoPack, Quant
from pyggml.quants.packers.fits import mean_squares
from pyggml.quants.registry import NUMBERS, quant
from pyggml.quants.unpack import UNPACK

_PIECE = 1 << 18  # weights of one call in one thread: 1 MiB of float32, some 10 ms of packing


def dequantize(raw: np.ndarray, name: str) -> np.ndarray:
    """The float32 values of a tensor of type `name`.

    raw: (..., row_bytes) uint8; plain types also (..., n) float32, float16, uint16 for BF16,
    float64 or signed integers. It need not be contiguous. Returns (..., n) float32, C-contiguous,
    bitwise equal to ggml's `to_float` but for NaN payloads; F64 and integers are rounded to the
    nearest float32.
    Raises QuantError for an unknown type, or a dtype or row length of raw that does not fit it.
    """
    if dtype(name) in NUMBERS:
        with np.errstate(over="ignore"):
            return _as_blocks(raw, dtype(name)).view(dtype(name).numpy).astype(np.float32)
    q = quant(name)
    src = _as_blocks(raw, q.dtype)
    row_bytes = src.shape[-1]
    n = row_bytes // q.dtype.block_bytes * q.dtype.block
    out = np.empty((*src.shape[:-1], n), np.float32)
    blocks = src.reshape(-1, q.dtype.block_bytes)
    values = out.reshape(-1, q.dtype.block)

    def unpack(start: int, stop: int) -> None:
        UNPACK[q.dtype.name](values[start:stop], blocks[start:stop], stop - start)

    share_blocks(len(blocks), q.dtype.block, unpack)
    return out


def quantize(array: np.ndarray, name: str, importance: np.ndarray | None = None) -> np.ndarray:
    """`array` packed as type `name`, with bytes equal to ggml's.

    array: (..., n) of floats, rounded to float32 first; it need not be contiguous. n is a multiple
    of the type's block. importance: how much each column's error counts, (n,), or (n_matrices, n)
    for that many stacked matrices; types with `NoFit` ignore it, IQ2_XXS, IQ2_XS and
    IQ1_S need it. Returns (..., row_bytes) uint8.
    Raises QuantError for an unknown or unwritable type, an n that does not fit, a value that is not
    finite or too large for the type, and importance that is not finite and 0 or more.
    """
    q = quant(name)
    if array.dtype.kind != "f" or array.ndim == 0:
        raise QuantError(
            f"packing as {name} wants an array of floats with at least one axis; "
            f"found {array.dtype} with shape {array.shape}"
        )
    out = np.empty((*array.shape[:-1], q.dtype.row_bytes(array.shape[-1])), np.uint8)
    blocks = out.reshape(-1, q.dtype.block_bytes)
    values = np.ascontiguousarray(array).reshape(-1, q.dtype.block)
    pack = _pack_of(q, values, array.shape[-1], importance)

    def work(start: int, stop: int) -> None:
        src = values[start:stop].astype(np.float32)  # a copy: one compiled kernel for all inputs
        largest = _largest(src, start * q.dtype.block, array.shape, name)
        pack(blocks[start:stop], src, start)
        if largest > q.limit:
            _check_fits(q, blocks[start:stop], src, largest)

    share_blocks(len(blocks), q.dtype.block, work)
    return out


def _pack_of(
    q: Quant, values: np.ndarray, n: int, importance: np.ndarray | None
) -> Callable[[np.ndarray, np.ndarray, int], None]:
    """pack(dst, src, start) for the blocks from `start` on; values (n_blocks, block), rows of n."""
    pack, fit = q.pack, q.fit
    if importance is None or isinstance(fit, NoFit):
        if isinstance(pack, NoPack):
            raise QuantError(f"tensors of type {q.dtype} cannot be written: {pack.reason}")
        return lambda dst, src, start: pack(dst, src)
    n_blocks, block = values.shape
    per_row, n_rows = n // block, n_blocks * block // n
    each = np.ascontiguousarray(importance, np.float32).reshape(-1, per_row, block)
    if n_rows % len(each):
        raise QuantError(f"importance of {len(each)} matrices does not divide {n_rows} rows")
    if not (np.isfinite(each).all() and (each >= 0).all()):
        raise QuantError("importance must be finite and 0 or more")
    means = np.zeros(n_rows, np.float32)
    if block == 32:  # others take the mean over a block
        mean_squares(means, values.reshape(n_rows, n).astype(np.float32, copy=False), 1)

    def weighted(dst: np.ndarray, src: np.ndarray, start: int) -> None:
        row, at = np.divmod(np.arange(start, start + len(src)), per_row)
        importance_of = each[row // (n_rows // len(each)), at]
        fit(dst, src, importance_of, means[row])

    return weighted


def _as_blocks(raw: np.ndarray, d: DType) -> np.ndarray:
    """raw as contiguous uint8 (..., row_bytes)."""
    if raw.ndim == 0 or raw.dtype not in (np.uint8, d.numpy):
        native = "" if d.numpy == np.uint8 else f" or {d.numpy}"
        raise QuantError(
            f"{d.name} data must be uint8{native} with at least one axis; "
            f"found {raw.dtype} with shape {raw.shape}"
        )
    src = np.ascontiguousarray(raw).view(np.uint8)
    if src.shape[-1] % d.block_bytes:
        raise QuantError(
            f"rows of {src.shape[-1]} bytes are no whole number of {d.name}'s "
            f"{d.block_bytes}-byte blocks"
        )
    return src


def share_blocks(n_blocks: int, block: int, work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) for pieces of 0 … n_blocks, on all threads if there are several.

    block: the weights of a block.
    """
    step = max(_PIECE // block, 1)
    starts = range(0, n_blocks, step)

    def piece(start: int) -> None:
        with np.errstate(all="ignore"):  # of interpreted kernels; inf and NaN scales are legal
            work(start, min(start + step, n_blocks))

    if len(starts) <= 1 or threads.get() == 1 or not JIT:
        for start in starts:
            piece(start)
        return
    piece(0)  # compiles the kernel, in one thread
    with ThreadPoolExecutor(threads.get()) as pool:
        for _ in pool.map(piece, starts[1:]):
            pass


def _largest(src: np.ndarray, offset: int, shape: tuple[int, ...], name: str) -> float:
    """The largest magnitude; QuantError if a value is not finite. src is float32."""
    largest = float(np.abs(src).max())
    if not np.isfinite(largest):
        flat = src.ravel()
        at = int(np.flatnonzero(~np.isfinite(flat))[0])
        index = tuple(int(i) for i in np.unravel_index(offset + at, shape))
        raise QuantError(
            f"only finite float32 values can be packed as {name}; found {flat[at]} at {index}"
        )
    return largest


def _check_fits(q: Quant, blocks: np.ndarray, src: np.ndarray, largest: float) -> None:
    """QuantError if packing overflowed: the blocks decode to infinity, NaN or zero."""
    values = np.empty_like(src)
    UNPACK[q.dtype.name](values, blocks, len(blocks))
    if not np.abs(values - src).max() <= largest / 2:
        raise QuantError(
            f"values up to {largest:.4g} in magnitude are too large for {q.dtype.name}"
        )
