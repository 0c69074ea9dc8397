"""Attention backward in float32: dq of a tile of queries, then dk and dv of a tile of keys.

    ds = p·(do·v − δ)·(1 − tanh²)·scale,  δ = do·o,  dsink = −Σ e^(sink − lse)·δ

Each block sums alone what it writes, in a fixed order: no two blocks add to the same number.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.scores import (
    THREADS,
    ZERO,
    bias_of,
    cap_score,
    dot_of,
    factors_of,
    keys_of_queries,
    keys_of_query,
    sizes_of,
    tile_filler,
    tile_rows,
)
from pyggml.backends.cuda.code.blocks import block_sum
from pyggml.backends.cuda.code.formulas import softcap_back
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS as MOST_THREADS
from pyggml.backends.cuda.runtime.launches import in_turn, launch, per_element, per_row
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor


@kernel
def _deltas(delta, o, do, n_queries, n_heads, head_size):
    """delta (H, T) = do·o."""
    for e in range(cuda.grid(1), delta.size, cuda.gridsize(1)):
        head, query = e // n_queries, e % n_queries
        at, total = (query * n_heads + head) * head_size, ZERO
        for c in range(head_size):
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
def _one_score(dot, product, query, key, head, span, mask, lse, delta, sizes, factors):
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
def _queries_kernel(head_size: int, value_size: int) -> Any:
    rows = tile_rows(max(head_size, value_size))
    wide, of_values, square = (rows, head_size + 1), (rows, value_size + 1), (rows, rows)
    fill, fill_values = (tile_filler(F32.name, rows, size) for size in (head_size, value_size))

    @kernel
    def backward(dq, q, k, v, span, mask, lse, do, delta, sizes, factors):
        qs = cuda.shared.array(wide, np.float32)
        dos = cuda.shared.array(of_values, np.float32)
        ks = cuda.shared.array(wide, np.float32)
        vs = cuda.shared.array(of_values, np.float32)
        sums = cuda.shared.array(wide, np.float32)
        ds = cuda.shared.array(square, np.float32)
        me, first, head = cuda.threadIdx.x, cuda.blockIdx.x * rows, cuda.blockIdx.y
        key_head = head // (sizes.n_heads // sizes.n_key_heads)
        count = min(rows, sizes.n_queries - first)
        fill(qs, q, first, head, sizes.n_queries, sizes.n_heads)
        fill_values(dos, do, first, head, sizes.n_queries, sizes.n_heads)
        for e in range(me, rows * head_size, THREADS):
            sums[e // head_size, e % head_size] = ZERO
        start, stop = keys_of_queries(span, first, count, sizes.n_keys)
        for key in range(start, stop, rows):
            fill(ks, k, key, key_head, sizes.n_keys, sizes.n_key_heads)
            fill_values(vs, v, key, key_head, sizes.n_keys, sizes.n_key_heads)
            cuda.syncthreads()
            for e in range(me, rows * rows, THREADS):
                i, j = e // rows, e % rows
                dot, product = dot_of(qs, i, ks, j, head_size), dot_of(dos, i, vs, j, value_size)
                _, ds[i, j] = _one_score(
                    dot, product, first + i, key + j, head, span, mask, lse, delta, sizes, factors
                )
            cuda.syncthreads()
            for e in range(me, rows * head_size, THREADS):
                i, c = e // head_size, e % head_size
                for j in range(rows):
                    sums[i, c] += ds[i, j] * ks[j, c]
            cuda.syncthreads()
        for e in range(me, count * head_size, THREADS):
            i, c = e // head_size, e % head_size
            dq[(np.int64(first + i) * sizes.n_heads + head) * head_size + c] = sums[i, c]

    return backward


@device
def _add(sums, weights, xs, size):
    """sums (keys, size) += weightsᵀ·xs."""
    rows, keys = weights.shape
    for e in range(cuda.threadIdx.x, keys * size, THREADS):
        j, c = e // size, e % size
        for i in range(rows):
            sums[j, c] += weights[i, j] * xs[i, c]


@device
def _clear(sums, size):
    for e in range(cuda.threadIdx.x, sums.shape[0] * size, THREADS):
        sums[e // size, e % size] = ZERO


@device
def _write_keys(out, sums, first, key_head, sizes, size):
    """The gradients of a tile of keys."""
    for e in range(cuda.threadIdx.x, min(sums.shape[0], sizes.n_keys - first) * size, THREADS):
        j, c = e // size, e % size
        out[(np.int64(first + j) * sizes.n_key_heads + key_head) * size + c] = sums[j, c]


@cache
def _keys_kernel(head_size: int, value_size: int) -> Any:
    keys = tile_rows(max(head_size, value_size))
    rows = keys // 2
    of_q, of_do, scores = (rows, head_size + 1), (rows, value_size + 1), (rows, keys)
    of_k, of_v = (keys, head_size + 1), (keys, value_size + 1)
    fill_q, fill_k = (tile_filler(F32.name, n, head_size) for n in (rows, keys))
    fill_do, fill_v = (tile_filler(F32.name, n, value_size) for n in (rows, keys))

    @kernel
    def backward(dk, dv, q, k, v, span, mask, lse, do, delta, sizes, factors):
        qs = cuda.shared.array(of_q, np.float32)
        dos = cuda.shared.array(of_do, np.float32)
        ks = cuda.shared.array(of_k, np.float32)
        vs = cuda.shared.array(of_v, np.float32)
        dks = cuda.shared.array(of_k, np.float32)
        dvs = cuda.shared.array(of_v, np.float32)
        p = cuda.shared.array(scores, np.float32)
        ds = cuda.shared.array(scores, np.float32)
        me, first, key_head = cuda.threadIdx.x, cuda.blockIdx.x * keys, cuda.blockIdx.y
        repeats = sizes.n_heads // sizes.n_key_heads
        fill_k(ks, k, first, key_head, sizes.n_keys, sizes.n_key_heads)
        fill_v(vs, v, first, key_head, sizes.n_keys, sizes.n_key_heads)
        _clear(dks, head_size)
        _clear(dvs, value_size)
        for query in range(0, sizes.n_queries, rows):
            count = min(rows, sizes.n_queries - query)
            start, stop = keys_of_queries(span, query, count, sizes.n_keys)
            if start >= first + keys or stop <= first:
                continue
            for head in range(key_head * repeats, key_head * repeats + repeats):
                cuda.syncthreads()
                fill_q(qs, q, query, head, sizes.n_queries, sizes.n_heads)
                fill_do(dos, do, query, head, sizes.n_queries, sizes.n_heads)
                cuda.syncthreads()
                for e in range(me, rows * keys, THREADS):
                    i, j = e // keys, e % keys
                    dot = dot_of(qs, i, ks, j, head_size)
                    product = dot_of(dos, i, vs, j, value_size)
                    p[i, j], ds[i, j] = _one_score(
                        dot, product, query + i, first + j, head, span, mask, lse, delta, sizes,
                        factors,
                    )  # fmt: skip
                cuda.syncthreads()
                _add(dks, ds, qs, head_size)
                _add(dvs, p, dos, value_size)
        cuda.syncthreads()
        _write_keys(dk, dks, first, key_head, sizes, head_size)
        _write_keys(dv, dvs, first, key_head, sizes, value_size)

    return backward


def scratch(node: Tensor, compute: Compute) -> int:
    """δ (H, T)."""
    return F32.block_bytes * node.shape[0] * node.shape[1]


def bind(site: CudaSite) -> Call:
    node = site.node
    q, k, v, span, o, lse, do, *extras = site.src
    dk, dv, *dsinks = site.saved
    sizes, factors = sizes_of(node, node.src[7:]), factors_of(node)
    mask = extras[0] if node.params["masked"] else q
    head_sizes = node.shape[2], node.src[2].shape[2]
    delta, rows = site.scratch.view(np.float32), tile_rows(max(head_sizes))
    common = (q, k, v, span, mask, lse, do, delta, sizes, factors)
    tiles = -(-sizes.n_queries // rows), sizes.n_heads
    key_tiles = -(-sizes.n_keys // rows), sizes.n_key_heads
    deltas = per_element(
        _deltas, delta.size, site.stream, delta, o, do, sizes.n_queries, sizes.n_heads,
        head_sizes[1],
    )  # fmt: skip
    calls = [
        deltas,
        launch(_queries_kernel(*head_sizes), tiles, THREADS, site.stream, site.out, *common),
        launch(_keys_kernel(*head_sizes), key_tiles, THREADS, site.stream, dk, dv, *common),
    ]
    if dsinks:
        of_sinks = per_row(
            _sinks, sizes.n_heads, sizes.n_queries, site.stream, dsinks[0], extras[-1], lse, delta,
            sizes.n_queries,
        )  # fmt: skip
        calls.append(of_sinks)
    return in_turn(*calls)
