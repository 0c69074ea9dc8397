"""A norm with the wide rows that are made of it, and its gradient with the wide gradient after it.

    total = a + b, its copy, X = [norm(total)·w | products with each A]
    total = a + the norm's gradient, the norm once more, D = [total | its product with B]

A cluster of eight blocks takes 16 rows, and each block an eighth of their columns, which it has in
registers: so nothing is read two times, and no launch is between. Blocks send each other their sums
of rows, then their parts of the products; the numbers lie as in wide.py. Cards have clusters since
Hopper; others, and longer rows, take a kernel for each of both.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from pyggml import ops
from pyggml.backends.cuda.code import cluster_ptx, ptx
from pyggml.backends.cuda.code.cluster_ptx import MOST_BLOCKS, has_clusters
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.fours import eights, lies_in_fours, load_eight, vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import ALL
from pyggml.backends.cuda.ops.lora.nodes import WIDE_GRADIENT, WIDE_ROWS
from pyggml.backends.cuda.ops.lora.operands import in_words
from pyggml.backends.cuda.ops.lora.thin_tiles import (
    ROWS,
    TILE_COLUMNS,
    adder,
    clear_tiles,
    hold,
    put_held,
    put_tiles,
    tiles_of,
)
from pyggml.backends.cuda.ops.lora.wide import COLUMNS, MANY_ROWS, TOGETHER, columns, sharer
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor
from pyggml.ops.in_bf16 import bf16_op
from pyggml.ops.norm.norm_mul import RMS_NORM_MUL, rms_norm_mul_back
from pyggml.sizes import round_up

_WARPS, _MOST_STEPS, _MOST_COLUMNS = 8, 2, 24
_BLOCKS = MOST_BLOCKS


class _ClusterForm(NamedTuple):
    """Steps of 32 columns of a warp, tiles of further columns, and sums of a row."""

    steps: int
    n_tiles: int
    n_sums: int

    @property
    def n(self) -> int:
        return self.n_tiles * TILE_COLUMNS


def _share(k: int) -> int:
    """Columns of a block."""
    return round_up(-(-k // _BLOCKS), 8)


def _steps(k: int) -> int:
    return -(-_share(k) // (COLUMNS * _WARPS))


def _together(steps: int) -> int:
    """Blocks for which a multiprocessor is to have room."""
    return TOGETHER if steps == 1 else 2


@cache
def _joiner(form: _ClusterForm) -> tuple[Any, Any, Any]:
    """(begin, join, finish) of the blocks of a cluster."""
    n_numbers, (begin_sharing, share_products) = ROWS * form.n_sums, sharer(_WARPS, form.n)

    @device
    def begin(of_sums, of_products):
        if cuda.threadIdx.x == 0:
            cluster_ptx.expect_bytes(of_sums, np.uint32(4 * _BLOCKS * n_numbers))
        begin_sharing(of_products)

    return begin, _join(form, n_numbers), _finish(form, share_products)


def _join(form: _ClusterForm, n_numbers: int) -> Any:
    n_sums, threads = form.n_sums, 32 * _WARPS
    of_warps, of_blocks = (_WARPS, n_numbers), (_BLOCKS, n_numbers)

    @device
    def join(sums, barrier):
        """sums (2, n_sums), of a lane's part of rows g and g + 8, become those of whole rows."""
        by_warp = cuda.shared.array(of_warps, np.float32)
        by_block = cuda.shared.array(of_blocks, np.float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        for half in range(2):
            for i in range(n_sums):
                x = sums[half, i]
                x += cuda.shfl_xor_sync(ALL, x, 1)
                x += cuda.shfl_xor_sync(ALL, x, 2)
                if lane & 3 == 0:
                    by_warp[warp, ((lane >> 2) + 8 * half) * n_sums + i] = x
        cuda.syncthreads()
        cluster_ptx.await_cluster()  # until then another block may not have begun
        for e in range(cuda.threadIdx.x, _BLOCKS * n_numbers, threads):
            at, x = e // _BLOCKS, ZERO
            for w in range(_WARPS):
                x += by_warp[w, at]
            place = 4 * (cuda.blockIdx.x * n_numbers + at)
            cluster_ptx.send(by_block, place, barrier, np.uint32(e % _BLOCKS), x)
        cluster_ptx.await_bytes(barrier)
        for half in range(2):
            for i in range(n_sums):
                x = ZERO
                for block in range(_BLOCKS):
                    x += by_block[block, ((lane >> 2) + 8 * half) * n_sums + i]
                sums[half, i] = x

    return join


def _finish(form: _ClusterForm, share_products: Any) -> Any:
    n_tiles, n = form.n_tiles, form.n
    of_parts = _WARPS, ROWS * n

    @device
    def finish(tiles, barrier, out, copy, has_copy, first, m, further, step):
        parts = cuda.shared.array(of_parts, np.float32)
        put_tiles(parts, tiles, n_tiles, 1, 0, n)
        cuda.syncthreads()
        share_products(parts, barrier, out, copy, has_copy, first, m, further, step)

    return finish


@cache
def _rows_kernel(form: _ClusterForm, in_bf16: bool, in_rows: bool) -> Any:
    """in_bf16: whether b is; in_rows: whether the rows of A begin and end where fours do."""
    place, load = cluster_ptx.clusters_of(_BLOCKS), eights(in_bf16)
    begin, join, finish = _joiner(form)
    (steps, n_tiles, _), add_tiles = form, adder(in_rows, 1)
    of_x, of_words, of_tiles = (2 * steps, 8), (steps, 8), (n_tiles, 4)

    @partial(kernel, most_threads=32 * _WARPS, least_blocks=_together(steps))
    def norm_rows(total, copy, out, thin, a, b, w, tiles, m, k, share, eps, step, reads):
        """reads: whether total, and its copy, are read."""
        place()
        barrier, other = cuda.shared.array(1, np.uint64), cuda.shared.array(1, np.uint64)
        x, sums = cuda.local.array(of_x, np.float32), cuda.local.array((2, 1), np.float32)
        words = cuda.local.array(of_words, np.uint32)
        products = cuda.local.array(of_tiles, np.float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, mine = lane >> 2, COLUMNS * warp + 8 * (lane & 3)
        first = np.int64(cuda.blockIdx.y) * ROWS
        start = np.int64(cuda.blockIdx.x) * share
        begin(barrier, other)
        for half in range(2):
            sums[half, 0] = ZERO
        follow()
        for i in range(2 * steps):
            row, column, is_inside = _place(i, first + group, start, mine, share, k)
            at = min(row, m - 1) * k + column
            p, q = load_eight(a, at), load(b, at)
            for e in range(8):
                x[i, e] = p[e] + q[e] if is_inside else ZERO
                sums[i & 1, 0] += x[i, e] * x[i, e]
            if is_inside and row < m:
                _put(total, copy, at, x, i, reads)
        join(sums, barrier)
        clear_tiles(products, n_tiles)
        for i in range(2 * steps):
            row, column, is_inside = _place(i, first + group, start, mine, share, k)
            inside = np.uint32(0xFFFFFFFF) if is_inside else np.uint32(0)
            rate = ONE / math.sqrt(sums[i & 1, 0] / np.float32(k) + eps)
            hold(words, i >> 1, i & 1, _words_of_norm(x, i, w, column, rate), inside)
            if is_inside and row < m:
                put_held(out, row * step + column, words, i >> 1, i & 1)
        for s in range(steps):
            column = min(start + mine + s * COLUMNS * _WARPS, k - 8)
            add_tiles(products, words, s, tiles, n_tiles, column)
        finish(products, other, out, thin, True, first, m, k, step)

    return follower(norm_rows)


@device
def _place(i, first, start, mine, share, k):
    """(Row, column, whether a block has it) of the eight numbers of a lane that it holds as i."""
    further = mine + (i >> 1) * COLUMNS * _WARPS
    is_inside = further < share and start + further < k
    return first + 8 * (i & 1), min(start + further, k - 8), is_inside


@device
def _put(total, copy, at, x, i, reads):
    """The eight numbers x[i] in float32 and in bfloat16, as far as they are read."""
    a, b, c, d = x[i, 0], x[i, 1], x[i, 2], x[i, 3]
    e, f, g, h = x[i, 4], x[i, 5], x[i, 6], x[i, 7]
    if reads[0]:
        ptx.put_eight(total, at, a, b, c, d, e, f, g, h)
    if reads[1]:
        ptx.put_eight_bf16(copy, at, a, b, c, d, e, f, g, h)


@device
def _words_of_norm(x, i, w, column, rate):
    """x[i] · rate · w, in words."""
    f = load_eight(w, column)
    return in_words((
        x[i, 0] * rate * f[0], x[i, 1] * rate * f[1], x[i, 2] * rate * f[2], x[i, 3] * rate * f[3],
        x[i, 4] * rate * f[4], x[i, 5] * rate * f[5], x[i, 6] * rate * f[6], x[i, 7] * rate * f[7],
    ))  # fmt: skip


@cache
def _gradient_kernel(form: _ClusterForm, types: tuple[bool, bool]) -> Any:
    """types: whether x and dy are BF16."""
    place, (load_x, load_dy) = cluster_ptx.clusters_of(_BLOCKS), map(eights, types)
    begin, join, finish = _joiner(form)
    (steps, n_tiles, _), add_tiles = form, adder(False, 1)
    of_x, of_words, of_tiles = (2 * steps, 8), (steps, 8), (n_tiles, 4)

    @partial(kernel, most_threads=32 * _WARPS, least_blocks=_together(steps))
    def norm_gradient(total, norm, out, x, w, dy, y, tiles, m, k, share, eps, step, reads):
        """reads: whether total, and the norm, are read."""
        place()
        barrier, other = cuda.shared.array(1, np.uint64), cuda.shared.array(1, np.uint64)
        xs, gs = cuda.local.array(of_x, np.float32), cuda.local.array(of_x, np.float32)
        ys, sums = cuda.local.array(of_x, np.float32), cuda.local.array((2, 2), np.float32)
        words = cuda.local.array(of_words, np.uint32)
        products = cuda.local.array(of_tiles, np.float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, mine = lane >> 2, COLUMNS * warp + 8 * (lane & 3)
        first = np.int64(cuda.blockIdx.y) * ROWS
        start = np.int64(cuda.blockIdx.x) * share
        begin(barrier, other)
        for half in range(2):
            sums[half, 0] = sums[half, 1] = ZERO
        follow()
        for i in range(2 * steps):
            row, column, is_inside = _place(i, first + group, start, mine, share, k)
            at = min(row, m - 1) * k + column
            p, q, f, s = load_x(x, at), load_dy(dy, at), load_eight(w, column), load_eight(y, at)
            for e in range(8):
                xs[i, e], gs[i, e], ys[i, e] = p[e] if is_inside else ZERO, q[e] * f[e], s[e]
                sums[i & 1, 0] += xs[i, e] * xs[i, e]
                sums[i & 1, 1] += xs[i, e] * gs[i, e]
        join(sums, barrier)
        clear_tiles(products, n_tiles)
        for i in range(2 * steps):
            row, column, is_inside = _place(i, first + group, start, mine, share, k)
            inside = np.uint32(0xFFFFFFFF) if is_inside else np.uint32(0)
            rate = ONE / math.sqrt(sums[i & 1, 0] / np.float32(k) + eps)
            pull = rate * rate * (sums[i & 1, 1] / np.float32(k))
            for e in range(8):
                ys[i, e] += rate * (gs[i, e] - xs[i, e] * pull)
            hold(words, i >> 1, i & 1, _words_of(ys, i), inside)
            if is_inside and row < m:
                at = row * k + column
                if reads[1]:
                    n = _words_of_norm(xs, i, w, column, rate)
                    ptx.store_words(norm, 2 * at, n[0], n[1], n[2], n[3])
                _put(total, out, at, ys, i, (reads[0], False))
                put_held(out, row * step + column, words, i >> 1, i & 1)
        for s in range(steps):
            column = min(start + mine + s * COLUMNS * _WARPS, k - 8)
            add_tiles(products, words, s, tiles, n_tiles, column)
        finish(products, other, out, out, False, first, m, k, step)

    return follower(norm_gradient)


@device
def _words_of(x, i):
    return in_words((x[i, 0], x[i, 1], x[i, 2], x[i, 3], x[i, 4], x[i, 5], x[i, 6], x[i, 7]))


# -- what they stand for --------------------------------------------------------------------------


def _fits(x: Tensor, wide: Tensor, ranks: Sequence[int], *residuals: Tensor) -> bool:
    """Whether a cluster takes these rows of the same shape, and so many further columns."""
    n, k = sum(map(columns, ranks)), x.shape[-1]
    alike = all(t.shape == x.shape and t.is_contiguous for t in residuals) and len(x.shape) == 2
    fits = k % 8 == 0 and _steps(k) <= _MOST_STEPS and n <= _MOST_COLUMNS
    fits = fits and x.shape[0] < MANY_ROWS  # of which two launches take less
    plain = not wide.params.get("formula") and lies_in_fours(x, *residuals)
    return ptx.TENSOR_CORES and has_clusters() and alike and fits and plain


def _serves_rows(m: Match, compute: Compute) -> bool:
    factors = m.rows.src[1:]
    ranks = [a.shape[0] for a in factors]
    rounded = m.copy.dtype is BF16 and m.norm.dtype is BF16
    plain = rounded and m.a.dtype is F32 and not m.is_read(m.norm)
    return plain and m.w.n_elements == m.norm.shape[-1] and _fits(m.total, m.rows, ranks, m.a, m.b)


def _call(
    run: Callable[[_ClusterForm], Any], sites: tuple[CudaSite, CudaSite], ranks: Sequence[int],
    n_sums: int, further: Sequence[Any], arrays: Sequence[Any], tiles: Any,
) -> Call:  # fmt: skip
    """further: results beside the wide one, None where none reads it"""
    norm, wide = sites
    total = wide.out.view(np.float32) if further[0] is None else further[0]
    other = wide.out if further[1] is None else further[1]
    reads = further[0] is not None, further[1] is not None
    m, k = wide.node.src[0].shape
    steps, n_tiles = _steps(k), sum(map(columns, ranks)) // TILE_COLUMNS
    form = _ClusterForm(steps, n_tiles, n_sums)
    return launch(
        run(form), (_BLOCKS, -(-m // ROWS)), 32 * _WARPS, wide.stream,
        total, other, wide.out, *arrays, tiles, m, k, _share(k), norm.scalars[0],
        wide.node.shape[1], reads,
    )  # fmt: skip


def _bind_rows(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    add, copy, norm, rows = sites
    factors, ranks = rows.src[1:], [a.shape[0] for a in rows.node.src[1:]]
    k, in_rows = rows.node.src[0].shape[1], all(map(vectorizable, factors))
    tiles = tiles_of(factors, ranks, rows.node.params["scales"], (k, 1))
    run = partial(_rows_kernel, in_bf16=add.node.src[1].dtype is BF16, in_rows=in_rows)
    arrays = *rows.saved, *add.src, norm.src[1]
    return _call(run, (norm, rows), ranks, 1, (add.out, copy.out), arrays, tiles)


_ROUNDED_NORM = bf16_op(RMS_NORM_MUL, (), (0,))


def _sum_norm_and_rows(rng: np.random.Generator) -> Graph:
    x = ops.add(drawn(rng, 21, 48), drawn(rng, 21, 48))
    norm = _ROUNDED_NORM(x, drawn(rng, 48), eps=1e-3)
    factors = drawn(rng, 5, 48), drawn(rng, 8, 48)
    rows = WIDE_ROWS(norm, *factors, scales=(0.5, 2.0))
    return Graph.of(ops.cpy(x, BF16), rows, ops.scale(x, 2.0))


def _serves_gradient(m: Match, compute: Compute) -> bool:
    norm, ranks = m.get("norm"), [m.b.shape[1]]
    plain = {m.total.dtype, m.back.dtype, m.a.dtype} == {F32} and not m.is_read(m.back)
    alike = norm is None or (norm.dtype is BF16 and norm.params == m.back.params)
    of_row = m.w.n_elements == m.back.shape[-1] and not m.total.is_write
    return plain and alike and of_row and _fits(m.x, m.d, ranks, m.a, m.dy)


def _bind_gradient(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    *norms, back, add, wide = sites
    (x, w, dy), rank = back.src, wide.node.src[1].shape[1]
    types = back.node.src[0].dtype is BF16, back.node.src[2].dtype is BF16
    tiles = tiles_of([wide.src[1]], [rank], wide.node.params["scales"], (1, rank))
    further = add.out, norms[0].out if norms else None
    arrays = x, w, dy, add.src[0]
    run = partial(_gradient_kernel, types=types)
    return _call(run, (back, wide), [rank], 2, further, arrays, tiles)


def _gradients(rng: np.random.Generator, again: bool) -> Graph:
    x, w = drawn(rng, 21, 56), drawn(rng, 56)
    total = ops.add(drawn(rng, 21, 56), rms_norm_mul_back(x, w, drawn(rng, 21, 56), eps=1e-3))
    d = WIDE_GRADIENT(total, drawn(rng, 56, 5), scales=(0.5,))
    norms = [_ROUNDED_NORM(x, w, eps=1e-3)] if again else []
    return Graph.of(*norms, total, d)


NORM_ROWS = Fusion(
    near("""
        total = add(a, b)
        copy = cpy(total)
        norm = rms_norm_mul(total, w)
        rows = wide_rows(norm, *factors)
    """),
    _serves_rows, _bind_rows, _sum_norm_and_rows, Memory.INPLACE,
)  # fmt: skip
_GRADIENT = """\
back = rms_norm_mul_back(x, w, dy)
total = add(a, back)
d = wide_gradient(total, b)
"""
NORM_AGAIN_GRADIENT = Fusion(
    near("norm = rms_norm_mul(x, w)\n" + _GRADIENT),
    _serves_gradient, _bind_gradient, partial(_gradients, again=True), Memory.INPLACE,
)  # fmt: skip
NORM_GRADIENT = Fusion(
    near(_GRADIENT),
    _serves_gradient, _bind_gradient, partial(_gradients, again=False), Memory.INPLACE,
)  # fmt: skip
