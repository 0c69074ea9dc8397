"""Queries and keys of few tokens normalised and turned, keys and values cached: all at once.

A warp has one head of one token. This is what stands between the products of q, k and v and the
attention in the generation of models with norms of heads, such as Qwen 3 and Gemma 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.attention import decode
from pyggml.backends.cuda.attention.one_token import Token, serves
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, sync_warp, warp_sum
from pyggml.backends.cuda.ops.rows import faults_of_rows
from pyggml.backends.cuda.rewrites.branches import ranges
from pyggml.backends.cuda.rewrites.fusion import declare_pattern
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Site
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F16, F32

MOST_TOKENS = 8
_WIDEST = 512  # numbers of a head
_WARPS = small(4, 1)  # of a block


class Turn(NamedTuple):
    """Which pairs of a head are turned: see pyggml/ops/attention/rope.py."""

    n_pairs: int
    neox: bool
    offset: int


@device
def _normed(head, x, at, weights, d, eps):
    """A head normalised, in shared memory."""
    total, lane = ZERO, cuda.threadIdx.x % LANES
    for i in range(lane, d, LANES):
        total += x[at + i] * x[at + i]
    rate = ONE / math.sqrt(warp_sum(total) / np.float32(d) + eps)
    for i in range(lane, d, LANES):
        head[i] = x[at + i] * rate * weights[i]


@device
def _turned(out, to, head, d, table, token, turn):
    """out[to …] = the head, its pairs turned by the token's angles."""
    n, turns = turn.n_pairs, 2 * token * turn.n_pairs
    for job in range(cuda.threadIdx.x % LANES, d - n, LANES):
        if job < n:
            cos, sin = table[turns + job], table[turns + n + job]
            first = turn.offset + (job if turn.neox else 2 * job)
            second = first + (n if turn.neox else 1)
            p, q = head[first], head[second]
            out[to + first] = p * cos - q * sin
            out[to + second] = p * sin + q * cos
        else:
            i = job - n
            i = i if i < turn.offset else i + 2 * n
            out[to + i] = head[i]


@cache
def _heads() -> Any:
    @kernel
    def heads(q_out, k_cache, v_cache, q, k, v, weights, table, ids, sizes, eps, turn, faults):
        rows = cuda.shared.array((_WARPS, _WIDEST), np.float32)
        n_tokens, n_heads, n_key_heads, d, n_rows = sizes
        warp, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        of_token = n_heads + 2 * n_key_heads
        for job in range(
            cuda.blockIdx.x * _WARPS + warp, n_tokens * of_token, cuda.gridDim.x * _WARPS
        ):
            token, head = job // of_token, job % of_token
            if head < n_heads:
                at = (token * n_heads + head) * d
                _normed(rows[warp], q, at, weights[0], d, eps[0])
                sync_warp()
                _turned(q_out, at, rows[warp], d, table, token, turn)
            else:
                row, head = ids[token], head - n_heads
                is_value = head >= n_key_heads
                head = head - n_key_heads if is_value else head
                at, to = (token * n_key_heads + head) * d, (row * n_key_heads + head) * d
                if not 0 <= row < n_rows:
                    cuda.atomic.max(faults[0], 0, faults[1])
                elif is_value:
                    for i in range(lane, d, LANES):
                        v_cache[to + i] = v[at + i]
                else:
                    for other in range(token):
                        if ids[other] == row:
                            cuda.atomic.max(faults[0], 0, faults[2])
                    _normed(rows[warp], k, at, weights[1], d, eps[1])
                    sync_warp()
                    _turned(k_cache, to, rows[warp], d, table, token, turn)
            sync_warp()

    return heads


def _follow(sites: Sequence[Site]) -> bool:
    """Whether each node reads the one before it in the pattern, head by head."""
    q_norm, q_turn, k_norm, k_turn, k_put, v_put = (site.node for site in sites)
    return (
        q_turn.src[0] is q_norm
        and k_turn.src[0] is k_norm
        and k_put.src[1].root is k_turn
        and q_turn.params == k_turn.params
        and all(t.src[1].root is q_turn.src[1].root for t in (q_turn, k_turn))
        and v_put.src[2] is k_put.src[2]
    )


def _are_heads(sites: Sequence[Site], is_read: Sequence[bool]) -> bool:
    """Whether they are heads of few tokens, cached in float16 or float32."""
    q_norm, _, k_norm, _, k_put, v_put = sites
    if not _follow(sites):
        return False
    if is_read[0] or is_read[2] or is_read[3]:  # a norm of all heads at once, say
        return False
    n_tokens, _, d = q_norm.node.shape
    k, v = k_norm.node.src[0], v_put.node.src[1]
    n_key_heads, cache, ids = k.shape[1], k_put.node.src[0], k_put.node.src[2]
    return (
        (n_tokens <= MOST_TOKENS and d <= _WIDEST)
        and (*k.shape,) == (n_tokens, n_key_heads, d)
        and all(s.node.src[1].shape == (d,) for s in (q_norm, k_norm))
        and all(s.node.src[0].dtype in (F16, F32) for s in (k_put, v_put))
        and k_put.node.src[0].shape == v_put.node.src[0].shape == (cache.shape[0], n_key_heads * d)
        and ids.shape == (n_tokens,)
        and v.n_elements == k.n_elements
    )


def _bind(sites: Sequence[Site], is_read: Sequence[bool]) -> Call | None:
    if not _are_heads(sites, is_read):
        return None
    q_norm, q_turn, k_norm, _, k_put, v_put = sites
    n_tokens, n_heads, d = q_norm.node.shape
    n_key_heads, cache = k_norm.node.src[0].shape[1], k_put.node.src[0]
    weights = q_norm.src[1], k_norm.src[1]
    reads = k_norm.src[0], v_put.src[1], q_turn.src[1], k_put.src[2], *weights
    # Queries may be turned where they lie; what is read of other heads, too, must lie elsewhere.
    out, *others = ranges((q_turn.out, *reads))
    if any(out.meets(other) for other in others):  # the plan has given it their memory
        return None
    table, p = q_turn.node.src[1], q_turn.node.params
    turn = Turn(table.shape[-1], bool(p["neox"]), p["offset"])
    sizes = (n_tokens, n_heads, n_key_heads, d, cache.shape[0])
    no_row, twice = faults_of_rows(k_put, cache.shape[0])
    n_jobs = n_tokens * (n_heads + 2 * n_key_heads)
    return launch(
        _heads(), min(-(-n_jobs // _WARPS), 1 << 16), _WARPS * LANES, q_norm.stream, q_turn.out,
        k_put.out, v_put.out, q_norm.src[0], k_norm.src[0], v_put.src[1],
        weights, q_turn.src[1], k_put.src[2], sizes,
        (*q_norm.scalars, *k_norm.scalars), turn, (k_put.faults.cell, no_row, twice),
    )  # fmt: skip


def _bind_attended(sites: Sequence[Site], is_read: Sequence[bool]) -> Call | None:
    """The heads of one token, made in the kernel of the attention that reads them."""
    q_norm, q_turn, k_norm, _, k_put, v_put, attention = sites
    if is_read[1] or not _are_heads(sites[:6], is_read) or attention.node.src[0] is not q_turn.node:
        return None
    if q_norm.node.shape[0] != 1 or not decode.takes(attention.node):
        return None
    if ranges(attention.src[1:3]) != ranges((k_put.out, v_put.out)):
        return None
    n_rows, table, p = k_put.node.src[0].shape[0], q_turn.node.src[1], q_turn.node.params
    no_row, _ = faults_of_rows(k_put, n_rows)
    token = Token(
        q_norm.src[0], k_norm.src[0], v_put.src[1], (q_norm.src[1], k_norm.src[1]),
        (*q_norm.scalars, *k_norm.scalars), q_turn.src[1], k_put.src[2], k_put.out, v_put.out,
        n_rows, (k_put.faults.cell, no_row),
    )  # fmt: skip
    n_pairs = table.shape[-1] if p["neox"] and not p["offset"] else 0
    if not serves(q_norm.node.shape[2], n_pairs, token):
        return None
    reads = ranges((token.q, token.k, token.v, token.table, token.ids, *token.weights))
    writes = ranges((attention.out, *attention.saved, attention.scratch))
    if any(w.meets(r) for w in writes for r in reads):  # the plan has given it their memory
        return None
    return decode.bind(attention, token)


_OPS = *("rms_norm_mul", "rope_apply") * 2, "set_rows", "set_rows"
declare_pattern(*_OPS, bind=_bind, in_place=True)
declare_pattern(*_OPS, "flash_attn_ext", bind=_bind_attended, in_place=True)
