"""Attention of few queries over many keys, as in generation: blocks share the keys of a head.

A block takes 64 keys of one query and head, each of its warps every so many of them; a lane holds
every 32nd number of a head. A second kernel joins the blocks' sums, in their order.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.scores import (
    MINUS_INF,
    NO_KEYS,
    ONE,
    ZERO,
    bias_of,
    capped,
    factors_of,
    key_loader,
    seen,
    sizes_of,
)
from pyggml.backends.cuda.driver import SIMULATED, cuda, device, kernel
from pyggml.backends.cuda.kernel import Site
from pyggml.backends.cuda.launch import in_turn, launch
from pyggml.backends.cuda.warp import LANES, warp_sum
from pyggml.call import Call
from pyggml.dtypes import F32
from pyggml.tensors import Tensor

MOST = 2 if SIMULATED else 8  # queries
_KEYS = 4 if SIMULATED else 64  # of a block
_WARPS = 2 if SIMULATED else 4


def takes(node: Tensor) -> bool:
    """Whether it is the path for this attention."""
    return node.shape[0] <= MOST


def _n_parts(node: Tensor) -> int:
    return -(-node.src[1].shape[0] // _KEYS)


def scratch(node: Tensor) -> int:
    """Of each query, head and block: the sum of its values, then its maximum and its weight."""
    n_queries, n_heads, head_size = node.shape
    return F32.block_bytes * n_queries * n_heads * _n_parts(node) * (head_size + 2)


@device
def _join(parts, at, sums, ends):
    """The block's sum, maximum and weight, of its warps'."""
    n_warps, head_size = sums.shape
    highest = MINUS_INF
    for w in range(n_warps):
        highest = max(highest, ends[w, 0])
    base = ZERO if highest == MINUS_INF else highest
    for c in range(cuda.threadIdx.x, head_size, cuda.blockDim.x):
        value = ZERO
        for w in range(n_warps):
            value += sums[w, c] * math.exp(ends[w, 0] - base)
        parts[at + c] = value
    if cuda.threadIdx.x == 0:
        weight = ZERO
        for w in range(n_warps):
            weight += ends[w, 1] * math.exp(ends[w, 0] - base)
        parts[at + head_size], parts[at + head_size + 1] = highest, weight


@cache
def _partial(head_size: int, key_type: str) -> Any:
    load, mine = key_loader(key_type), -(-head_size // LANES)
    tops, results = (_WARPS, 2), (_WARPS, head_size)

    @kernel
    def partial(parts, q, k, v, span, mask, sizes, factors):
        ends = cuda.shared.array(tops, np.float32)
        sums = cuda.shared.array(results, np.float32)
        held = cuda.local.array(mine, np.float32)
        o = cuda.local.array(mine, np.float32)
        part, head, query = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        row = (np.int64(query) * sizes.n_heads + head) * head_size
        key_head = head // (sizes.n_heads // sizes.n_key_heads)
        for i in range(mine):
            c = lane + i * LANES
            held[i], o[i] = q[row + c] if c < head_size else ZERO, ZERO
        start, stop = seen(span, query, sizes.n_keys)
        top, weight = MINUS_INF, ZERO
        last = min(stop, (part + 1) * _KEYS)
        for key in range(part * _KEYS + warp, last, _WARPS):
            if key < start:
                continue
            at, dot = (np.int64(key) * sizes.n_key_heads + key_head) * head_size, ZERO
            for i in range(mine):
                c = lane + i * LANES
                if c < head_size:
                    dot += held[i] * load(k, at + c)
            z = capped(warp_sum(dot), factors)
            z += bias_of(head, query, key, stop, mask, sizes, factors)
            highest = max(top, z)
            base = ZERO if highest == MINUS_INF else highest
            shrink, p = math.exp(top - base), math.exp(z - base)
            top, weight = highest, weight * shrink + p
            for i in range(mine):
                c = lane + i * LANES
                if c < head_size:
                    o[i] = o[i] * shrink + p * load(v, at + c)
        for i in range(mine):
            c = lane + i * LANES
            if c < head_size:
                sums[warp, c] = o[i]
        if lane == 0:
            ends[warp, 0], ends[warp, 1] = top, weight
        cuda.syncthreads()
        at = ((np.int64(query) * sizes.n_heads + head) * cuda.gridDim.x + part) * (head_size + 2)
        _join(parts, at, sums, ends)

    return partial


@kernel
def _whole(out, lse, parts, sinks, n_parts, head_size, sizes):
    """out = the blocks' sums over their weight, a block for each query and head."""
    head, query = cuda.blockIdx.x, cuda.blockIdx.y
    row, step = np.int64(query) * sizes.n_heads + head, head_size + 2
    first = row * n_parts * step
    sink = sinks[head] if sizes.has_sinks else MINUS_INF
    highest = sink
    for part in range(n_parts):
        highest = max(highest, parts[first + part * step + head_size])
    base = ZERO if highest == MINUS_INF else highest
    weight = math.exp(sink - base)
    for part in range(n_parts):
        at = first + part * step + head_size
        weight += parts[at + 1] * math.exp(parts[at] - base)
    share = ONE / weight if weight > ZERO else ZERO
    for c in range(cuda.threadIdx.x, head_size, cuda.blockDim.x):
        value = ZERO
        for part in range(n_parts):
            at = first + part * step
            value += parts[at + c] * math.exp(parts[at + head_size] - base)
        out[row * head_size + c] = value * share
    if cuda.threadIdx.x == 0:
        found = base + math.log(weight) if weight > ZERO else NO_KEYS
        lse[np.int64(head) * sizes.n_queries + query] = found


def bind(site: Site) -> Call:
    node, stream = site.node, site.stream
    q, k, v, span, *extras = site.src
    sizes, n_parts = sizes_of(node, node.src[4:]), _n_parts(node)
    mask = extras[0] if node.params["masked"] else q
    sinks = extras[-1] if sizes.has_sinks else q
    n_queries, n_heads, head_size = node.shape
    if node.src[1].dtype is not F32:
        k, v = k.view(np.uint8), v.view(np.uint8)
    parts, run = site.scratch.view(np.float32), _partial(head_size, node.src[1].dtype.name)
    of_parts = (parts, q, k, v, span, mask, sizes, factors_of(node))
    of_whole = (site.out, site.saved[0], parts, sinks, n_parts, head_size, sizes)
    grid, threads = (n_parts, n_heads, n_queries), _WARPS * LANES
    return in_turn(
        launch(run, grid, threads, stream, *of_parts),
        launch(_whole, (n_heads, n_queries), threads, stream, *of_whole),
    )
