"""Queries and keys of few tokens normalised and turned, keys and values cached: all at once.

A warp has one head of one token. This is what stands between the products of q, k and v and the
attention in the generation of models with norms of heads, such as Qwen 3 and Gemma 3.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.attention import DECODE, decode, path_of
from pyggml.backends.cuda.attention.one_token import Token, serves
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, sync_warp, warp_sum
from pyggml.backends.cuda.gemm.few_rows import has_few_bits
from pyggml.backends.cuda.ops.layout.rows import faults_of_rows
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite, is_of
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.kit.places import span
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F16, F32
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor, leaf, zeros
from pyggml.ops import flash_attn_ext, reshape, rms_norm_mul, rope_table, set_rows
from pyggml.ops.attention.rope import rope_apply

MOST_TOKENS = 32
_WIDEST = 512  # numbers of a head
_WARPS = small(4, 1)  # of a block


class Turn(NamedTuple):
    """Which pairs of a head are turned: see pyggml/ops/attention/rope.py."""

    n_pairs: int
    neox: bool
    offset: int


@device
def _normalise(head, x, at, weights, d, eps):
    """A head normalised, in shared memory."""
    total, lane = ZERO, cuda.threadIdx.x % LANES
    for i in range(lane, d, LANES):
        total += x[at + i] * x[at + i]
    rate = ONE / math.sqrt(warp_sum(total) / np.float32(d) + eps)
    for i in range(lane, d, LANES):
        head[i] = x[at + i] * rate * weights[i]


@device
def _rotate(out, to, head, d, table, token, turn):
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
                _normalise(rows[warp], q, at, weights[0], d, eps[0])
                sync_warp()
                _rotate(q_out, at, rows[warp], d, table, token, turn)
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
                    for other in range(lane, token, LANES):
                        if ids[other] == row:
                            cuda.atomic.max(faults[0], 0, faults[2])
                    _normalise(rows[warp], k, at, weights[1], d, eps[1])
                    sync_warp()
                    _rotate(k_cache, to, rows[warp], d, table, token, turn)
            sync_warp()

    return heads


def _are_heads(m: Match, compute: Compute) -> bool:
    """Whether they are heads of few tokens, cached in float16 or float32."""
    if m.is_read(m.q_norm, m.k_norm, m.k_turn):  # a norm of all heads at once, say
        return False
    n_tokens, _, d = m.q_norm.shape
    n_key_heads = m.k.shape[1]
    return (
        (n_tokens <= MOST_TOKENS and d <= _WIDEST)
        and m.q_turn.params == m.k_turn.params
        and m.k.shape == (n_tokens, n_key_heads, d)
        and m.of_q.shape == m.of_k.shape == (d,)
        and all(t.dtype in (F16, F32) for t in (m.k_cache, m.v_cache))
        and m.k_cache.shape == m.v_cache.shape == (m.k_cache.shape[0], n_key_heads * d)
        and m.ids.shape == (n_tokens,)
        and m.v.n_elements == m.k.n_elements
    )


def _bind(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    q_norm, q_turn, k_norm, _, k_put, v_put = sites
    n_tokens, n_heads, d = q_norm.node.shape
    n_key_heads, cache = k_norm.node.src[0].shape[1], k_put.node.src[0]
    table, p = q_turn.node.src[1], q_turn.node.params
    turn = Turn(table.shape[-1], bool(p["neox"]), p["offset"])
    sizes = (n_tokens, n_heads, n_key_heads, d, cache.shape[0])
    no_row, twice = faults_of_rows(k_put, cache.shape[0])
    n_jobs = n_tokens * (n_heads + 2 * n_key_heads)
    return launch(
        _heads(), min(-(-n_jobs // _WARPS), 1 << 16), _WARPS * LANES, q_norm.stream, q_turn.out,
        k_put.out, v_put.out, q_norm.src[0], k_norm.src[0], v_put.src[1],
        (q_norm.src[1], k_norm.src[1]), q_turn.src[1], k_put.src[2], sizes,
        (*q_norm.scalars, *k_norm.scalars), turn, (k_put.faults.cell, no_row, twice),
    )  # fmt: skip


def _are_attended(m: Match, compute: Compute) -> bool:
    """The heads of one token, made in the kernel of the attention that reads them."""
    if m.is_read(m.q_turn) or not _are_heads(m, compute):
        return False
    places = [_place(t) for t in m.attention.src[1:3]]
    whole = path_of(m.attention, compute) is DECODE and places == [*map(_place, (m.k_put, m.v_put))]
    table, p = m.q_turn.src[1], m.q_turn.params
    turned = p["neox"] and not p["offset"]
    fits = serves(
        m.q_norm.shape[2], table.shape[-1] if turned else 0, m.q, m.k, m.v, m.of_q, m.of_k, table
    )
    return m.q_norm.shape[0] == 1 and whole and fits


def _place(t: Tensor) -> tuple[int, int]:
    """Where it lies in its owner's memory."""
    return t.offset, span(t)


def _bind_attended(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    q_norm, q_turn, k_norm, _, k_put, v_put, attention = sites
    n_rows = k_put.node.src[0].shape[0]
    no_row, _ = faults_of_rows(k_put, n_rows)
    token = Token(
        q_norm.src[0], k_norm.src[0], v_put.src[1], (q_norm.src[1], k_norm.src[1]),
        (*q_norm.scalars, *k_norm.scalars), q_turn.src[1], k_put.src[2], k_put.out, v_put.out,
        n_rows, (k_put.faults.cell, no_row),
    )  # fmt: skip
    product = q_norm.node.src[0].root
    releases_first = is_of(product, "mul_mat") and has_few_bits(product.src[0].dtype)
    return decode.bind(attention, token, releases_first)


def _queries_and_puts(
    rng: np.random.Generator, positions: tuple[int, ...], n_heads: tuple[int, int], head: int
) -> tuple[Tensor, list[Tensor]]:
    """Queries, and the caches with the keys and values of tokens; n_heads: of queries and keys."""
    n, ids = len(positions), leaf(np.arange(4, 4 - 3 * len(positions), -3, dtype=np.int32))
    table = rope_table(leaf(np.array(positions, np.int32)), n_dims=head)
    normed = (rms_norm_mul(drawn(rng, n, many, head), drawn(rng, head)) for many in n_heads)
    q, k = (rope_apply(x, table, "neox") for x in normed)
    width = n_heads[1] * head
    rows = (reshape(x, (n, width)) for x in (k, drawn(rng, n, n_heads[1], head)))
    return q, [set_rows(zeros((6, width), F16), x, ids) for x in rows]


def _two_tokens(rng: np.random.Generator) -> Graph:
    q, puts = _queries_and_puts(rng, (3, 7), (3, 1), 8)
    return Graph.of(q, *puts)


def _one_attended(rng: np.random.Generator) -> Graph:
    q, puts = _queries_and_puts(rng, (3,), (4, 2), 128)
    span_of_keys = leaf(np.array([[1, 5]], np.int32))
    k, v = (reshape(put, (6, 2, 128)) for put in puts)
    o = flash_attn_ext(q, k, v, span_of_keys, 0.3)
    return Graph.of(o, *puts)


_HEADS = """\
q_norm = rms_norm_mul(q, of_q)
q_turn = rope_apply(q_norm, view(table))
k_norm = rms_norm_mul(k, of_k)
k_turn = rope_apply(k_norm, view(table))
k_put = set_rows(k_cache, view(k_turn), ids)
v_put = set_rows(v_cache, v, ids)
"""
_ATTENDED = "attention = flash_attn_ext(q_turn, view(k_put), view(v_put), *others)"
# Queries may be turned in place.
HEADS = Fusion(near(_HEADS), _are_heads, _bind, _two_tokens, Memory.INPLACE_FIRST)
ATTENDED_HEADS = Fusion(
    near(_HEADS + _ATTENDED), _are_attended, _bind_attended, _one_attended,
    scratch=lambda node, compute: decode.scratch(node.params["of"].nodes[-1], compute),
)  # fmt: skip
