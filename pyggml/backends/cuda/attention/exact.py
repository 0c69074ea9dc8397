"""Attention forward in float32: a block of threads takes a tile of queries of one head.

Keys come tile by tile; maximum, sum and result are carried along (Dao et al. 2022), so that no
(queries × keys) matrix exists.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.scores import (
    MINUS_INF,
    NO_KEYS,
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
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32


@device
def _score(s, qs, kv, span, mask, first, key, head, head_size, sizes, factors):
    """The scores of a tile, −∞ where a query does not see a key."""
    rows, keys = s.shape
    for e in range(cuda.threadIdx.x, rows * keys, THREADS):
        i, j = e // keys, e % keys
        s[i, j] = MINUS_INF
        if first + i < sizes.n_queries:
            start, stop = keys_of_query(span, first + i, sizes.n_keys)
            if start <= key + j < stop:
                z = cap_score(dot_of(qs, i, kv, j, head_size), factors)
                s[i, j] = z + bias_of(head, first + i, key + j, stop, mask, sizes, factors)


@device
def _carry(s, top, total, shrink):
    """The scores become exponentials; each row's maximum and sum move on."""
    rows, keys = s.shape
    for i in range(cuda.threadIdx.x, rows, THREADS):
        highest = top[i]
        for j in range(keys):
            highest = max(highest, s[i, j])
        base = ZERO if highest == MINUS_INF else highest
        shrink[i] = math.exp(top[i] - base)
        total[i] *= shrink[i]
        for j in range(keys):
            s[i, j] = math.exp(s[i, j] - base)
            total[i] += s[i, j]
        top[i] = highest


@device
def _finish(lse, top, total, shrink, sinks, first, count, head, sizes):
    """lse = the logarithm of each row's sum with its sink, shrink = the factor of the row's result,
    which is not divided by the sum yet."""
    for i in range(cuda.threadIdx.x, count, THREADS):
        sink = sinks[head] if sizes.has_sinks else MINUS_INF
        highest = max(top[i], sink)
        base = ZERO if highest == MINUS_INF else highest
        shrink[i] = math.exp(top[i] - base)
        weight = total[i] * shrink[i] + math.exp(sink - base)
        shrink[i] = shrink[i] / weight if weight > ZERO else ZERO
        at = np.int64(head) * sizes.n_queries + first + i
        lse[at] = base + math.log(weight) if weight > ZERO else NO_KEYS


@cache
def _kernel(head_size: int, value_size: int, key_type: str, value_type: str) -> Any:
    widest = max(head_size, value_size)
    rows = tile_rows(widest)
    keys = 2 * rows
    of_queries, of_sums, tall = (rows, head_size + 1), (rows, value_size + 1), (keys, widest + 1)
    scores = (rows, keys)
    fill_queries = tile_filler(F32.name, rows, head_size)
    fill_keys = tile_filler(key_type, keys, head_size)
    fill_values = tile_filler(value_type, keys, value_size)

    @kernel
    def forward(o, lse, q, k, v, span, mask, sinks, sizes, factors):
        qs = cuda.shared.array(of_queries, np.float32)
        sums = cuda.shared.array(of_sums, np.float32)
        kv = cuda.shared.array(tall, np.float32)
        s = cuda.shared.array(scores, np.float32)
        top = cuda.shared.array(rows, np.float32)
        total = cuda.shared.array(rows, np.float32)
        shrink = cuda.shared.array(rows, np.float32)
        me, first, head = cuda.threadIdx.x, cuda.blockIdx.x * rows, cuda.blockIdx.y
        key_head = head // (sizes.n_heads // sizes.n_key_heads)
        count = min(rows, sizes.n_queries - first)
        fill_queries(qs, q, first, head, sizes.n_queries, sizes.n_heads)
        for e in range(me, rows * value_size, THREADS):
            sums[e // value_size, e % value_size] = ZERO
        for i in range(me, rows, THREADS):
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
            for e in range(me, rows * value_size, THREADS):
                i, c = e // value_size, e % value_size
                value = sums[i, c] * shrink[i]
                for j in range(keys):
                    value += s[i, j] * kv[j, c]
                sums[i, c] = value
            cuda.syncthreads()
        _finish(lse, top, total, shrink, sinks, first, count, head, sizes)
        cuda.syncthreads()
        for e in range(me, count * value_size, THREADS):
            i, c = e // value_size, e % value_size
            at = (np.int64(first + i) * sizes.n_heads + head) * value_size + c
            o[at] = sums[i, c] * shrink[i]

    return forward


def bind(site: CudaSite) -> Call:
    node = site.node
    q, k, v, span, *extras = site.src
    sizes = sizes_of(node, node.src[4:])
    mask = extras[0] if node.params["masked"] else q
    sinks = extras[-1] if sizes.has_sinks else q
    keys, values = node.src[1:3]
    run = _kernel(keys.shape[2], values.shape[2], keys.dtype.name, values.dtype.name)
    k, v = (x if t.dtype is F32 else x.view(np.uint8) for x, t in ((k, keys), (v, values)))
    grid = -(-sizes.n_queries // tile_rows(max(keys.shape[2], values.shape[2]))), sizes.n_heads
    return launch(
        run, grid, THREADS, site.stream, site.out, site.saved[0], q, k, v, span, mask,
        sinks, sizes, factors_of(node),
    )  # fmt: skip
