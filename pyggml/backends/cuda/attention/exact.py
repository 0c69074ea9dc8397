"""Attention in float32, forward and backward: a block of threads takes a tile of rows of one head.

The other side comes tile by tile, so that no (queries × keys) matrix exists (Dao et al. 2022): the
forward pass carries maximum, sum and result along. Gradients are those of a tile of queries, then
those of a tile of keys:

    ds = p·(do·v − δ)·(1 − tanh²)·scale,  δ = do·o,  dsink = −Σ e^(sink − lse)·δ

Each block sums alone what it writes, in a fixed order: no two blocks add to the same number.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.scores import (
    MINUS_INF,
    ZERO,
    base_of,
    bias_of,
    cap_score,
    key_loader,
    keys_of_queries,
    keys_of_query,
    raw_numbers,
    row_ender,
    scores_of,
)
from pyggml.backends.cuda.code.blocks import block_sum
from pyggml.backends.cuda.code.formulas import softcap_back
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS as MOST_THREADS
from pyggml.backends.cuda.runtime.launches import in_turn, launch, per_element, per_row
from pyggml.backends.cuda.runtime.simulator import on_card, small
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor

_THREADS = small(128, 4)  # of a block


@on_card
def tile_rows(head_size: int) -> int:
    """Rows of a tile, so that five tiles fit in a block's 48 KB of shared memory."""
    return 16 if head_size <= 128 else 8 if head_size <= 256 else 4


# -- tiles (rows, size + 1): a column more keeps threads in banks of their own ---------------------


@cache
def _filler(name: str, size: int) -> Any:
    """fill(tile, x, first, head, n, n_heads): rows first … of x (n, n_heads, size), 0 from n on."""
    load = key_loader(name)

    @device
    def fill(tile, x, first, head, n, n_heads):
        for e in range(cuda.threadIdx.x, tile.shape[0] * size, _THREADS):
            i, c = e // size, e % size
            at = (np.int64(first + i) * n_heads + head) * size + c
            tile[i, c] = load(x, at) if first + i < n else ZERO

    return fill


@device
def _clear(tile, size):
    for e in range(cuda.threadIdx.x, tile.shape[0] * size, _THREADS):
        tile[e // size, e % size] = ZERO


@device
def _write(out, tile, first, head, n, n_heads, size):
    """Rows first … of out (n, n_heads, size)."""
    for e in range(cuda.threadIdx.x, min(tile.shape[0], n - first) * size, _THREADS):
        i, c = e // size, e % size
        out[(np.int64(first + i) * n_heads + head) * size + c] = tile[i, c]


@device
def _dot(a, i, b, j, n):
    """Row i of tile a times row j of tile b."""
    total = ZERO
    for c in range(n):
        total += a[i, c] * b[j, c]
    return total


@device
def _add(sums, weights, xs, size, shrink):
    """sums (rows, size) = sums · shrink + weights · xs, of each row; shrink: None for 1."""
    for e in range(cuda.threadIdx.x, weights.shape[0] * size, _THREADS):
        i, c = e // size, e % size
        total = sums[i, c] if shrink is None else sums[i, c] * shrink[i]
        for j in range(weights.shape[1]):
            total += weights[i, j] * xs[j, c]
        sums[i, c] = total


# -- forward -------------------------------------------------------------------------------------


@device
def _score(s, qs, kv, span, mask, first, key, head, head_size, sizes, factors):
    """The scores of a tile, −∞ where a query does not see a key."""
    rows, keys = s.shape
    for e in range(cuda.threadIdx.x, rows * keys, _THREADS):
        i, j = e // keys, e % keys
        s[i, j] = MINUS_INF
        if first + i < sizes.n_queries:
            start, stop = keys_of_query(span, first + i, sizes.n_keys)
            if start <= key + j < stop:
                z = cap_score(_dot(qs, i, kv, j, head_size), factors)
                s[i, j] = z + bias_of(head, first + i, key + j, stop, mask, sizes, factors)


@device
def _carry(s, top, total, shrink):
    """The scores become exponentials; each row's maximum and sum move on."""
    rows, keys = s.shape
    for i in range(cuda.threadIdx.x, rows, _THREADS):
        highest = top[i]
        for j in range(keys):
            highest = max(highest, s[i, j])
        base = base_of(highest)
        shrink[i] = math.exp(top[i] - base)
        total[i] *= shrink[i]
        for j in range(keys):
            s[i, j] = math.exp(s[i, j] - base)
            total[i] += s[i, j]
        top[i] = highest


_end_row = row_ender(math.exp, math.log)


@device
def _finish(lse, sums, top, total, shrink, sinks, first, count, head, size, sizes):
    """Each row's sum becomes its result."""
    for i in range(cuda.threadIdx.x, count, _THREADS):
        sink = sinks[head] if sizes.has_sinks else MINUS_INF
        at = np.int64(head) * sizes.n_queries + first + i
        shrink[i], lse[at] = _end_row(top[i], total[i], sink)
    cuda.syncthreads()
    for e in range(cuda.threadIdx.x, count * size, _THREADS):
        sums[e // size, e % size] *= shrink[e // size]


@cache
def _forward(head_size: int, value_size: int, key_type: str, value_type: str) -> Any:
    widest = max(head_size, value_size)
    rows = tile_rows(widest)
    keys = 2 * rows
    of_queries, of_sums, tall = (rows, head_size + 1), (rows, value_size + 1), (keys, widest + 1)
    scores = (rows, keys)
    fill_queries, fill_keys = _filler(F32.name, head_size), _filler(key_type, head_size)
    fill_values = _filler(value_type, value_size)

    @kernel
    def forward(o, lse, q, k, v, span, mask, sinks, sizes, factors):
        qs = cuda.shared.array(of_queries, np.float32)
        sums = cuda.shared.array(of_sums, np.float32)
        kv = cuda.shared.array(tall, np.float32)
        s = cuda.shared.array(scores, np.float32)
        top = cuda.shared.array(rows, np.float32)
        total = cuda.shared.array(rows, np.float32)
        shrink = cuda.shared.array(rows, np.float32)
        first, head = cuda.blockIdx.x * rows, cuda.blockIdx.y
        key_head = head // (sizes.n_heads // sizes.n_key_heads)
        count = min(rows, sizes.n_queries - first)
        fill_queries(qs, q, first, head, sizes.n_queries, sizes.n_heads)
        _clear(sums, value_size)
        for i in range(cuda.threadIdx.x, rows, _THREADS):
            top[i], total[i] = MINUS_INF, ZERO
        start, stop = keys_of_queries(span, first, count, sizes.n_keys)
        for key in range(start, stop, keys):
            fill_keys(kv, k, key, key_head, sizes.n_keys, sizes.n_key_heads)
            cuda.syncthreads()
            _score(s, qs, kv, span, mask, first, key, head, head_size, sizes, factors)
            cuda.syncthreads()
            _carry(s, top, total, shrink)
            fill_values(kv, v, key, key_head, sizes.n_keys, sizes.n_key_heads)
            cuda.syncthreads()
            _add(sums, s, kv, value_size, shrink)
            cuda.syncthreads()
        _finish(lse, sums, top, total, shrink, sinks, first, count, head, value_size, sizes)
        _write(o, sums, first, head, sizes.n_queries, sizes.n_heads, value_size)

    return forward


def bind(site: CudaSite) -> Call:
    sizes, factors, mask, sinks = scores_of(site, 4, site.src[0])
    keys, values = site.node.src[1:3]
    run = _forward(keys.shape[2], values.shape[2], keys.dtype.name, values.dtype.name)
    grid = -(-sizes.n_queries // tile_rows(max(keys.shape[2], values.shape[2]))), sizes.n_heads
    return launch(
        run, grid, _THREADS, site.stream, site.out, site.saved[0], site.src[0],
        *raw_numbers(site, 1, 2), site.src[3], mask, sinks, sizes, factors,
    )  # fmt: skip


# -- backward ------------------------------------------------------------------------------------


@kernel
def _deltas(delta, o, do, n_queries, n_heads, size):
    """delta (H, T) = do·o."""
    for e in range(cuda.grid(1), delta.size, cuda.gridsize(1)):
        head, query = e // n_queries, e % n_queries
        at, total = (query * n_heads + head) * size, ZERO
        for c in range(size):
            total += do[at + c] * o[at + c]
        delta[e] = total


@kernel
def _sinks(dsinks, sinks, lse, delta, n_queries):
    parts = cuda.shared.array(MOST_THREADS, np.float32)
    for head in range(cuda.blockIdx.x, dsinks.size, cuda.gridDim.x):
        total = ZERO
        for t in range(cuda.threadIdx.x, n_queries, cuda.blockDim.x):
            at = head * n_queries + t
            total -= math.exp(sinks[head] - lse[at]) * delta[at]
        total = block_sum(total, parts)
        if cuda.threadIdx.x == 0:
            dsinks[head] = total


@device
def _slope(dot, product, query, key, head, span, mask, lse, delta, sizes, factors):
    """(p, ds) of a query and a key, given q·k and do·v; zeros where the query does not see it."""
    if query >= sizes.n_queries:
        return ZERO, ZERO
    start, stop = keys_of_query(span, query, sizes.n_keys)
    if not start <= key < stop:
        return ZERO, ZERO
    z = cap_score(dot, factors)
    at = np.int64(head) * sizes.n_queries + query
    bias = bias_of(head, query, key, stop, mask, sizes, factors)
    p = math.exp(z + bias - lse[at])
    ds = p * (product - delta[at]) * factors.scale
    return p, softcap_back(z, ds, factors.cap) if factors.cap > ZERO else ds


@cache
def _sloper(head_size: int, value_size: int) -> Any:
    @device
    def slopes(p, ds, qs, ks, dos, vs, query, key, head, of_scores):
        """p and ds of a tile, (queries, keys); p may be ds."""
        span, mask, lse, delta, sizes, factors = of_scores
        rows, keys = ds.shape
        for e in range(cuda.threadIdx.x, rows * keys, _THREADS):
            i, j = e // keys, e % keys
            dot, product = _dot(qs, i, ks, j, head_size), _dot(dos, i, vs, j, value_size)
            p[i, j], ds[i, j] = _slope(
                dot, product, query + i, key + j, head, span, mask, lse, delta, sizes, factors
            )

    return slopes


@cache
def _queries_kernel(head_size: int, value_size: int) -> Any:
    rows = tile_rows(max(head_size, value_size))
    wide, of_values, square = (rows, head_size + 1), (rows, value_size + 1), (rows, rows)
    fill, fill_values = _filler(F32.name, head_size), _filler(F32.name, value_size)
    slopes = _sloper(head_size, value_size)

    @kernel
    def backward(dq, q, k, v, do, span, mask, lse, delta, sizes, factors):
        qs = cuda.shared.array(wide, np.float32)
        dos = cuda.shared.array(of_values, np.float32)
        ks = cuda.shared.array(wide, np.float32)
        vs = cuda.shared.array(of_values, np.float32)
        dqs = cuda.shared.array(wide, np.float32)
        ds = cuda.shared.array(square, np.float32)
        of_scores = span, mask, lse, delta, sizes, factors
        first, head = cuda.blockIdx.x * rows, cuda.blockIdx.y
        key_head = head // (sizes.n_heads // sizes.n_key_heads)
        count = min(rows, sizes.n_queries - first)
        fill(qs, q, first, head, sizes.n_queries, sizes.n_heads)
        fill_values(dos, do, first, head, sizes.n_queries, sizes.n_heads)
        _clear(dqs, head_size)
        start, stop = keys_of_queries(span, first, count, sizes.n_keys)
        for key in range(start, stop, rows):
            fill(ks, k, key, key_head, sizes.n_keys, sizes.n_key_heads)
            fill_values(vs, v, key, key_head, sizes.n_keys, sizes.n_key_heads)
            cuda.syncthreads()
            slopes(ds, ds, qs, ks, dos, vs, first, key, head, of_scores)
            cuda.syncthreads()
            _add(dqs, ds, ks, head_size, None)
            cuda.syncthreads()
        _write(dq, dqs, first, head, sizes.n_queries, sizes.n_heads, head_size)

    return backward


@cache
def _keys_kernel(head_size: int, value_size: int) -> Any:
    keys = tile_rows(max(head_size, value_size))
    rows = keys // 2
    of_q, of_do, scores = (rows, head_size + 1), (rows, value_size + 1), (rows, keys)
    of_k, of_v = (keys, head_size + 1), (keys, value_size + 1)
    fill, fill_values = _filler(F32.name, head_size), _filler(F32.name, value_size)
    slopes = _sloper(head_size, value_size)

    @kernel
    def backward(dk, dv, q, k, v, do, span, mask, lse, delta, sizes, factors):
        qs = cuda.shared.array(of_q, np.float32)
        dos = cuda.shared.array(of_do, np.float32)
        ks = cuda.shared.array(of_k, np.float32)
        vs = cuda.shared.array(of_v, np.float32)
        dks = cuda.shared.array(of_k, np.float32)
        dvs = cuda.shared.array(of_v, np.float32)
        p = cuda.shared.array(scores, np.float32)
        ds = cuda.shared.array(scores, np.float32)
        of_scores = span, mask, lse, delta, sizes, factors
        first, key_head = cuda.blockIdx.x * keys, cuda.blockIdx.y
        repeats = sizes.n_heads // sizes.n_key_heads
        fill(ks, k, first, key_head, sizes.n_keys, sizes.n_key_heads)
        fill_values(vs, v, first, key_head, sizes.n_keys, sizes.n_key_heads)
        _clear(dks, head_size)
        _clear(dvs, value_size)
        for query in range(0, sizes.n_queries, rows):
            count = min(rows, sizes.n_queries - query)
            start, stop = keys_of_queries(span, query, count, sizes.n_keys)
            if start >= first + keys or stop <= first:
                continue
            for head in range(key_head * repeats, key_head * repeats + repeats):
                cuda.syncthreads()
                fill(qs, q, query, head, sizes.n_queries, sizes.n_heads)
                fill_values(dos, do, query, head, sizes.n_queries, sizes.n_heads)
                cuda.syncthreads()
                slopes(p, ds, qs, ks, dos, vs, query, first, head, of_scores)
                cuda.syncthreads()
                _add(dks, ds.T, qs, head_size, None)
                _add(dvs, p.T, dos, value_size, None)
        cuda.syncthreads()
        _write(dk, dks, first, key_head, sizes.n_keys, sizes.n_key_heads, head_size)
        _write(dv, dvs, first, key_head, sizes.n_keys, sizes.n_key_heads, value_size)

    return backward


def scratch_back(node: Tensor, compute: Compute) -> int:
    """δ (H, T)."""
    return F32.block_bytes * node.shape[0] * node.shape[1]


def bind_back(site: CudaSite) -> Call:
    q, k, v, span, o, lse, do, *_ = site.src
    dk, dv, *dsinks = site.saved
    (sizes, factors, mask, sinks), stream = scores_of(site, 7, site.src[0]), site.stream
    head_sizes = site.node.shape[2], site.node.src[2].shape[2]
    delta, rows = site.scratch.view(np.float32), tile_rows(max(head_sizes))
    common = q, k, v, do, span, mask, lse, delta, sizes, factors
    tiles = -(-sizes.n_queries // rows), sizes.n_heads
    key_tiles = -(-sizes.n_keys // rows), sizes.n_key_heads
    deltas = per_element(
        _deltas, delta.size, stream, delta, o, do, sizes.n_queries, sizes.n_heads, head_sizes[1]
    )
    calls = [
        deltas,
        launch(_queries_kernel(*head_sizes), tiles, _THREADS, stream, site.out, *common),
        launch(_keys_kernel(*head_sizes), key_tiles, _THREADS, stream, dk, dv, *common),
    ]
    if dsinks:
        n_heads, n = sizes.n_heads, sizes.n_queries
        calls.append(per_row(_sinks, n_heads, n, stream, dsinks[0], sinks, lse, delta, n))
    return in_turn(*calls)
