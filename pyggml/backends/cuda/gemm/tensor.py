"""Products on tensor cores where cuBLAS is not installed: by the tiles of products with one weight
per expert (grouped.py), of which there is one. A is rounded before, W unpacked by its blocks."""

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.gemm.grouped import product_call, tile_of
from pyggml.backends.cuda.gemm.grouped_tile import GroupedTile
from pyggml.backends.cuda.gemm.problem import (
    CudaOperands,
    CudaProblem,
    CudaProductPath,
    bytes_of_rounded,
    rounded,
)
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.graph.call import Call


def _tile_of(p: CudaProblem) -> GroupedTile | None:
    return tile_of(p.b.dtype.name, p.b_in_rows, p.m, 1)


def _takes(p: CudaProblem) -> bool:
    """Rows of A and of W begin at multiples of eight numbers."""
    lies_well = p.a_is_whole and p.b_is_whole and p.b_aligned
    in_eights = p.k % 8 == (0 if p.b_in_rows else p.n % 8) == 0
    return ptx.TENSOR_CORES and p.rounds and lies_well and in_eights and _tile_of(p) is not None


def _bind(p: CudaProblem, o: CudaOperands) -> Call:
    tile, (a, calls) = _tile_of(p), rounded(p, o)
    assert tile is not None
    sizes = (1, p.n, p.k) if p.b_in_rows else (1, p.k, p.n)
    product = product_call(
        p.b.dtype.name, tile, sizes, 1, o.stream, o.c, a, o.b.view(np.uint8), a, p.m,
        o.rounded_step, o.accumulate,
    )  # fmt: skip
    return in_turn(*calls, product)


TENSOR = CudaProductPath(
    name="tensor", takes=_takes, bind=_bind, scratch=bytes_of_rounded, shares=True
)
