"""Dot products of packed rows with float32, never unpacked: what one token at a time spends.

A block's weights are scale·q + low for groups of 16 or more, so its part of a dot product is
scale·Σ q x + low·Σ x. Whole numbers q go straight to vectors of float32, scales multiply sums, and
Σ x is the same for every row. Types that pyggml.gemm.blocks knows have this path; others are
unpacked first.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir

from pyggml._jit import cgutils, intrinsic, kernel, types
from pyggml.dtypes import DType, dtype
from pyggml.gemm.blocks import EMIT, FLOATS, GROUP, WIDE, Block, Emit
from pyggml.gemm.vectors import I64, every, total

LONGEST = 1 << 16  # numbers of a row whose group sums fit into a thread's scratch
_CHAINS = 4  # independent sums of a row, so that none waits for the one before


def step(kind: DType) -> int:
    """Weights that one round of the loop over a row takes: a row has a whole number of them."""
    return max(kind.block, WIDE)


def kind_of_rows(kind: DType, depth: int) -> int:
    """The number by which row_dot knows a type; -1 if it cannot take such rows."""
    known = kind.name in EMIT and depth % step(kind) == 0 and depth <= LONGEST
    return list(EMIT).index(kind.name) if known else -1


@kernel
def group_sums(sums, x):
    """Sums of GROUP neighbours of x."""
    for i in range(x.size // GROUP):
        total = np.float32(0)
        for j in range(GROUP):
            total += x[i * GROUP + j]
        sums[i] = total


@intrinsic(prefer_literal=True)
def row_dot(typing: Any, kind: Any, row: Any, x: Any, sums: Any, depth: Any) -> Any:
    """Σ w x of a packed row; its kind, a constant, and addresses of row, x and x's group sums."""
    name, emit = list(EMIT.items())[kind.literal_value]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _emit_row(builder, arguments[1:], dtype(name), emit)

    return types.float32(kind, *(types.intp,) * 4), codegen


def _emit_row(builder: Any, sides: list[Any], kind: DType, emit: Emit) -> Any:
    """The loop over a row's blocks, and their sum."""
    *bases, depth = sides
    n = step(kind)
    sizes = n // kind.block * kind.block_bytes, 4 * n, 4 * n // GROUP
    chains = [cgutils.alloca_once(builder, FLOATS) for _ in range(_CHAINS)]
    for chain in chains:
        builder.store(every(FLOATS, 0.0), chain)
    with cgutils.for_range(builder, builder.udiv(depth, ir.Constant(I64, n))) as loop:
        here = (
            builder.add(base, builder.mul(loop.index, ir.Constant(I64, size)))
            for base, size in zip(bases, sizes, strict=True)
        )
        emit(Block(builder, chains, *here))
    return total(builder, reduce(builder.fadd, [builder.load(chain) for chain in chains]))
