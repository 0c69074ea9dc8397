"""Blocks of any weight type unpacked to bfloat16 or float32, and float32 rounded to bfloat16."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.driver import cuda, kernel
from pyggml.backends.cuda.launch import per_element
from pyggml.backends.cuda.ptx import bf16_bits
from pyggml.backends.cuda.weights import weight_of
from pyggml.call import Call
from pyggml.dtypes import DType


@cache
def _to_bf16(name: str, block: int, block_bytes: int) -> Any:
    weight = weight_of(name)

    @kernel
    def unpack(out, raw):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            b = i // block
            out[i] = bf16_bits(weight(raw, b * block_bytes, i - b * block))

    return unpack


@cache
def _to_f32(name: str, block: int, block_bytes: int) -> Any:
    weight = weight_of(name)

    @kernel
    def unpack(out, raw):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            b = i // block
            out[i] = weight(raw, b * block_bytes, i - b * block)

    return unpack


def unpacked(out: Any, raw: Any, dtype: DType, stream: Any) -> Call:
    """A call that unpacks the blocks of raw (bytes) to out, of float32 or, as uint16, bfloat16."""
    make = _to_f32 if out.dtype == np.float32 else _to_bf16
    run = make(dtype.name, dtype.block, dtype.block_bytes)
    return per_element(run, out.size, stream, out, raw)


@kernel
def _round(out, x):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = bf16_bits(x[i])


def rounded(out: Any, x: Any, stream: Any) -> Call:
    """A call that rounds float32 x to bfloat16 in out (uint16)."""
    return per_element(_round, out.size, stream, out, x)
