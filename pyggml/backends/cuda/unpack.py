"""Blocks of any weight type unpacked to bfloat16 or float32, and float32 rounded to bfloat16."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.driver import SIMULATED, cuda, device, kernel
from pyggml.backends.cuda.launch import per_element
from pyggml.backends.cuda.ptx import as_float, bf16_bits, put_four_bf16
from pyggml.backends.cuda.weights import four_of, weight_of
from pyggml.call import Call
from pyggml.dtypes import DType


@cache
def _kernel(name: str, block: int, block_bytes: int, rounds: bool) -> Any:
    """Four weights a thread, or one of a plain type."""
    put, put_four = (_put_bf16, put_four_bf16) if rounds else (_put, _put_four)
    if block == 1:
        weight = weight_of(name)

        @kernel
        def unpack_plain(out, raw):
            for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
                put(out, i, weight(raw, i * block_bytes, 0))

        return unpack_plain
    four = four_of(name)

    @kernel
    def unpack(out, raw):
        for group in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
            i = 4 * group
            b = i // block
            first, second, third, fourth = four(raw, b * block_bytes, i - b * block)
            put_four(out, i, first, second, third, fourth)

    return unpack


@device
def _put_bf16(out, i, x):
    out[i] = bf16_bits(x)


@device
def _put(out, i, x):
    out[i] = x


@device
def _put_four(out, i, a, b, c, d):
    out[i], out[i + 1], out[i + 2], out[i + 3] = a, b, c, d


def unpacked(out: Any, raw: Any, dtype: DType, stream: Any) -> Call:
    """A call that unpacks the blocks of raw (bytes) to out, of float32 or, as uint16, bfloat16."""
    run = _kernel(dtype.name, dtype.block, dtype.block_bytes, out.dtype != np.float32)
    n = out.size if dtype.block == 1 else out.size // 4
    return per_element(run, n, stream, out, raw)


@kernel
def _round(out, x):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = bf16_bits(x[i])


if not SIMULATED:
    from pyggml.backends.cuda.ptx import load_words

    @kernel
    def _round_fours(out, x):
        for group in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
            a, b, c, d = load_words(x, 16 * group)
            put_four_bf16(out, 4 * group, as_float(a), as_float(b), as_float(c), as_float(d))


def rounded(out: Any, x: Any, stream: Any) -> Call:
    """A call that rounds float32 x to bfloat16 in out (uint16)."""
    if SIMULATED or out.size % 4 or not (_is_aligned(x, 16) and _is_aligned(out, 8)):
        return per_element(_round, out.size, stream, out, x)
    return per_element(_round_fours, out.size // 4, stream, out, x)


def _is_aligned(array: Any, n_bytes: int) -> bool:
    """Whether it begins at a multiple of n_bytes; a host's array stands for one that does."""
    found = getattr(array, "__cuda_array_interface__", None)
    return found is None or found["data"][0] % n_bytes == 0
