"""Scales of packed weights: changed, and the slopes along them; see ops/product/rescale.py.

A thread changes the scales of a block. A warp sums up the slopes of a block, for one scale after
the other, and of a product some rows of dw at a time.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.gemm import CudaOperands, CudaProblem, path_of
from pyggml.backends.cuda.ops.layout.rows import no_such_row
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT, Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_element, per_rows
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.cuda.weights.readers import half_of, part_of
from pyggml.backends.kit.products import factor_of, gaps_in
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, DType
from pyggml.graph.tensor import Tensor
from pyggml.quants.scales import scale_places
from pyggml.sizes import round_up

_TILE = 1 << 22  # numbers of dw that are there at a time


@device
def _half_bits(x):
    """The bits of the float16 nearest to x, ties to even."""
    bits = np.int64(ptx.bits_of(x))
    sign, a = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if a > 0x7F800000:
        return sign | 0x7E00
    if a >= 0x477FF000:
        return sign | 0x7C00
    if a < 0x38800000:  # subnormal: a multiple of 2^-24, as is the last bit of 0.5 + x
        return sign | (np.int64(ptx.bits_of(abs(x) + np.float32(0.5))) - 0x3F000000)
    return sign | ((a + 0x0FFF + ((a >> 13) & 1) - 0x38000000) >> 13)


@kernel
def _rescale(out, w, u, places, n_bytes, n_scales):
    """places: of each scale four nibbles, by byte and first bit."""
    for b in range(cuda.grid(1), w.size // n_bytes, cuda.gridsize(1)):
        at = np.int64(b) * n_bytes
        for i in range(n_bytes):
            out[at + i] = w[at + i]
        for k in range(n_scales):
            bits = np.int32(0)
            for i in range(4):
                p = 8 * k + 2 * i
                bits |= ((np.int32(w[at + places[p]]) >> places[p + 1]) & 15) << (4 * i)
            bits = _half_bits(half_of(bits) * (np.float32(1) + u[b * n_scales + k]))
            for i in range(4):
                p = 8 * k + 2 * i
                rest = np.int64(out[at + places[p]]) & ~(15 << places[p + 1])
                out[at + places[p]] = np.uint8(rest | ((bits >> (4 * i)) & 15) << places[p + 1])


def _bind_rescale(site: CudaSite) -> Call:
    dtype = site.node.dtype
    places = scale_places(dtype.name).astype(np.int32)
    n_bytes, n_scales = dtype.block_bytes, len(places)
    n_blocks = site.out.size // n_bytes
    return per_element(
        _rescale, n_blocks, site.stream, site.out, *site.src, site.constant(places.reshape(-1)),
        n_bytes, n_scales, writes=[site.out],
    )  # fmt: skip


class SlopeRows(NamedTuple):
    """Which row of w the slopes of a row are along.

    blocks   of a row
    n_rows   of w
    fault    the number of an id that is no row
    """

    blocks: int
    n_rows: int
    fault: int = 0


@cache
def _sums_kernel(dtype: DType, k: int, n_scales: int, by_ids: bool) -> Any:
    part, block, n_bytes = part_of(dtype.name, k), dtype.block, dtype.block_bytes

    @kernel
    def sums(out, w, dw, ids, rows, cell):
        parts = cuda.shared.array(THREADS, np.float32)
        for b in range(first_row(), dw.size // block, rows_apart()):
            row = b // rows.blocks
            if by_ids:
                row = np.int64(ids[row])
            total = ZERO
            if 0 <= row < rows.n_rows:
                at = (row * rows.blocks + b % rows.blocks) * n_bytes
                for j in range(cuda.threadIdx.x, block, cuda.blockDim.x):
                    total += part(w, at, j) * dw[np.int64(b) * block + j]
            elif cuda.threadIdx.x == 0:
                cuda.atomic.max(cell, 0, rows.fault)
            total = block_sum(total, parts)
            if cuda.threadIdx.x == 0:
                out[b * n_scales + k] = total

    return sums


def _sums(
    site: CudaSite, out: Any, w: Any, dw: Any, rows: SlopeRows, ids: Any = None
) -> Iterator[Call]:
    """Launches that put to `out` the sums of these rows of slopes."""
    dtype = site.node.src[0].dtype
    n_scales = len(scale_places(dtype.name))
    for k in range(n_scales):
        run = _sums_kernel(dtype, k, n_scales, ids is not None)
        yield per_rows(
            run, dw.size // dtype.block, dtype.block, site.stream, out, w, dw,
            out if ids is None else ids, rows, site.faults.cell,
        )  # fmt: skip


def _rows_of(w: Tensor, fault: int = 0) -> SlopeRows:
    return SlopeRows(w.shape[-1] // w.dtype.block, w.n_elements // w.shape[-1], fault)


def _bind_back(site: CudaSite) -> Call:
    w, dw = site.src
    return in_turn(*_sums(site, site.out, w, dw, _rows_of(site.node.src[0])))


def _bind_rows(site: CudaSite) -> Call:
    table, (w, dy, ids) = site.node.src[0], site.src
    fault = no_such_row(site, "rescale_back_rows", table.shape[0])
    return in_turn(*_sums(site, site.out, w, dy, _rows_of(table, fault), ids))


# -- of a product -------------------------------------------------------------------------------


def _tiles(node: Tensor, compute: Compute) -> list[tuple[int, CudaProblem]]:
    """(first row of dw, the product of so many rows) of each tile."""
    w, x, dy = node.src
    n, k = w.shape
    aligned = x.offset % 16 == 0  # see gemm/problem.py
    a, b = (factor_of(t, (1, 1), True) for t in (dy, x))
    whole = CudaProblem(n, k, x.shape[0], a, b, compute=compute, b_aligned=aligned)
    step = max(1, min(n, _TILE // max(k, 1)))
    return [(first, replace(whole, m=min(step, n - first))) for first in range(0, n, step)]


def _tile_bytes(tiles: list[tuple[int, CudaProblem]]) -> int:
    return round_up(max((F32.block_bytes * p.m * p.n for _, p in tiles), default=0), ALIGNMENT)


def _scratch(node: Tensor, compute: Compute) -> int:
    tiles = _tiles(node, compute)
    return _tile_bytes(tiles) + max((path_of(p).scratch(p) for _, p in tiles), default=0)


def _bind_product(site: CudaSite) -> Call:
    (w, x, dy), matrix, calls = site.src, site.node.src[0], list[Call]()
    tiles = _tiles(site.node, site.compute)
    own, row_bytes = _tile_bytes(tiles), matrix.dtype.row_bytes(matrix.shape[1])
    of_row = site.out.size // matrix.shape[0]
    for first, p in tiles:
        tile = site.scratch[: F32.block_bytes * p.m * p.n].view(np.float32)
        a = dy[first * p.a.row :]
        o = CudaOperands(tile, a, x, site.scratch[own:], False, site.stream)
        calls.append(path_of(p).bind(p, o))
        packed = w[first * row_bytes : (first + p.m) * row_bytes]
        out = site.out[first * of_row : (first + p.m) * of_row]
        calls += _sums(site, out, packed, tile, _rows_of(matrix)._replace(n_rows=p.m))
    return in_turn(*calls)


def _lacks(node: Tensor) -> str | None:
    wide = next((t for t in node.src[1:3] if t.dtype is not F32), None)
    return gaps_in(node.src[0]) or (None if wide is None else f"slopes of {wide.dtype}")


declare("rescale", _bind_rescale)
declare("rescale_back", _bind_back)
declare("rescale_back_rows", _bind_rows)
declare("rescale_back_out_prod", _bind_product, _lacks, _scratch)
