"""Blocks of any weight type unpacked to bfloat16 or float32, and float32 rounded to bfloat16.

Results may lie in wider rows: row r of n numbers begins at r · (n + gap).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.driver import SIMULATED, cuda, device, kernel
from pyggml.backends.cuda.launch import per_element
from pyggml.backends.cuda.ptx import (
    as_float,
    bf16_bits,
    put_eight,
    put_eight_bf16,
    put_four_bf16,
)
from pyggml.backends.cuda.weights import eights_of, weight_of
from pyggml.call import Call
from pyggml.dtypes import DType
from pyggml.quants.layout import GROUP


@device
def _wide(i, row, gap):
    """Where number i of rows of `row` numbers lies in rows that are wider by `gap`."""
    return i if gap == 0 else i + np.int64(np.uint32(i) // np.uint32(row)) * gap


@device
def _put_bf16(out, i, x):
    out[i] = bf16_bits(x)


@device
def _put(out, i, x):
    out[i] = x


@cache
def _one_kernel(name: str, block: int, block_bytes: int, rounds: bool) -> Any:
    """A weight a thread."""
    put, weight = _put_bf16 if rounds else _put, weight_of(name)

    @kernel
    def unpack(out, raw, n, row, gap):
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            b = i // block
            put(out, _wide(i, row, gap), weight(raw, b * block_bytes, i - b * block))

    return unpack


@cache
def _eights_kernel(name: str, block: int, block_bytes: int, rounds: bool) -> Any:
    """Of a block, a thread takes eight neighbours in each group of 32; None for a rare type."""
    eights = eights_of(name, put_eight_bf16 if rounds else put_eight)
    if eights is None:
        return None
    pieces = GROUP // 8

    @kernel
    def unpack(out, raw, n, row, gap):
        for i in range(cuda.grid(1), n // block * pieces, cuda.gridsize(1)):
            b = i // pieces
            eights(out, _wide(b * block, row, gap), raw, b * block_bytes, i % pieces * 8)

    return unpack


def unpacked(out: Any, raw: Any, dtype: DType, stream: Any, row: int = 1, gap: int = 0) -> Call:
    """A call that unpacks the blocks of raw (bytes) to out, of float32 or, as uint16, bfloat16."""
    n = raw.size // dtype.block_bytes * dtype.block
    kind = dtype.name, dtype.block, dtype.block_bytes, out.dtype != np.float32
    in_eights = dtype.block > 1 and gap % 8 == 0 and _is_aligned(out, 16)
    run = _eights_kernel(*kind) if in_eights else None
    if run is None:
        return per_element(_one_kernel(*kind), n, stream, out, raw, n, row, gap)
    return per_element(run, n // dtype.block * (GROUP // 8), stream, out, raw, n, row, gap)


@kernel
def _round(out, x, row, gap):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[_wide(i, row, gap)] = bf16_bits(x[i])


if not SIMULATED:
    from pyggml.backends.cuda.ptx import load_words

    @kernel
    def _round_fours(out, x, row, gap):
        for group in range(cuda.grid(1), x.size // 4, cuda.gridsize(1)):
            a, b, c, d = load_words(x, 16 * group)
            at = _wide(4 * group, row, gap)
            put_four_bf16(out, at, as_float(a), as_float(b), as_float(c), as_float(d))


def rounded(out: Any, x: Any, stream: Any, row: int = 4, gap: int = 0) -> Call:
    """A call that rounds float32 x to bfloat16 in out (uint16)."""
    in_fours = x.size % 4 == row % 4 == gap % 4 == 0 and _is_aligned(x, 16) and _is_aligned(out, 8)
    if SIMULATED or not in_fours:
        return per_element(_round, x.size, stream, out, x, row, gap)
    return per_element(_round_fours, x.size // 4, stream, out, x, row, gap)


def _is_aligned(array: Any, n_bytes: int) -> bool:
    """Whether it begins at a multiple of n_bytes; a host's array stands for one that does."""
    found = getattr(array, "__cuda_array_interface__", None)
    return found is None or found["data"][0] % n_bytes == 0
