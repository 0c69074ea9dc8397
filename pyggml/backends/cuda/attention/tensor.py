"""Attention forward on tensor cores, with sums in float32.

    in training      q, k and v rounded to bfloat16 or given so
    from a cache     of float16, to which q and the probabilities are rounded; with cap and sinks

A block takes 64 queries of a head, of a cache those of one sequence alone, each of its four warps
16 of them. Their q stays in registers,
or in training, where the warps can multiply together (group_ptx.py), in shared memory; keys come
64 at a time (of long heads 32), values while the scores are made, the next keys while values are
added.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.attention.fragments import (
    ALIGNED,
    BR,
    HEAD_SIZES,
    THREADS,
    clear,
    longest_first,
    rows_holder,
    rows_multiplier,
    rows_of_sequences,
    scale_rows,
    seen_by_rows,
    sums_adder,
    tile_copier,
    write_rows,
)
from pyggml.backends.cuda.attention.scores import MINUS_INF, ZERO, base_of, keys_of_query, row_ender
from pyggml.backends.cuda.code import group_ptx, ptx
from pyggml.backends.cuda.code.formulas import LOG2_E, softcap
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import quad_max, quad_sum
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT, Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.weights.unpack import round_to_bfloat16, round_to_float16
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F16, F32
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

_OF_CACHES = (64, 128, 256)  # numbers of a head
_MORE_TILES = small(32, 1)  # that blocks are there for: of further sequences


class _Form(NamedTuple):
    """What a kernel is compiled for: numbers of a head, the type that is multiplied, whether the
    result is BF16, what scores have beside their scale, and whether warps multiply together."""

    head_size: int
    kind: str
    out_in_bf16: bool
    has_cap: bool
    has_sinks: bool
    in_groups: bool = False

    @property
    def keys(self) -> int:
        """Keys at a time."""
        return 64 if self.head_size <= 128 else 32


def _fits(node: Tensor, compute: Compute, sizes: tuple[int, ...]) -> bool:
    """Whether products may round, and heads lie as they must."""
    (_, k, v), p = node.src[:3], node.params
    plain = not (p["masked"] or p["max_bias"])
    return (
        compute == "bf16"
        and ptx.TENSOR_CORES
        and plain
        and k.shape == v.shape
        and (node.src[0].shape[2] in sizes)
    )


def takes(node: Tensor, compute: Compute) -> bool:
    """Whether it computes this attention, or its gradient: scores without extras, no cache."""
    q, k, v = node.src[:3]
    n_extras = len(node.src) - (4 if len(node.saved) == 1 else 7)
    plain = not n_extras and not node.params["cap"] and q.shape[0] >= 16
    return plain and {k.dtype, v.dtype} <= {F32, BF16} and _fits(node, compute, HEAD_SIZES)


def takes_cache(node: Tensor, compute: Compute) -> bool:
    """Whether it computes this attention from a cache of float16."""
    q, k, v = node.src[:3]
    is_cache = k.dtype is v.dtype is F16 and q.dtype is F32
    return is_cache and len(node.saved) == 1 and _fits(node, compute, _OF_CACHES)


@cache
def _softmax(keys: int, has_cap: bool) -> Any:
    @device
    def softmax(s, top, total, starts, stops, key, scale, cap):
        """Scores become 2^(score − maximum); returns what sums so far shrink by, for both rows.

        top (2,), total (2,), starts (2,), stops (2,): of the lane's rows g and g + 8.
        """
        column = key + ((cuda.threadIdx.x & 3) << 1)
        first, second = top[0], top[1]
        for i in range(keys // 8):
            for e in range(4):
                j, r = np.int32(column + 8 * i + (e & 1)), e >> 1
                is_seen = starts[r] <= j and j < stops[r]
                score = s[i, e] * scale
                if has_cap:
                    score = softcap(score, cap)
                s[i, e] = score if is_seen else MINUS_INF
            first = max(first, max(s[i, 0], s[i, 1]))
            second = max(second, max(s[i, 2], s[i, 3]))
        first, second = quad_max(first), quad_max(second)
        base, other = base_of(first), base_of(second)
        shrink, shrink_other = ptx.power_of_two(top[0] - base), ptx.power_of_two(top[1] - other)
        here, there = ZERO, ZERO
        for i in range(keys // 8):
            s[i, 0] = ptx.power_of_two(s[i, 0] - base)
            s[i, 1] = ptx.power_of_two(s[i, 1] - base)
            s[i, 2] = ptx.power_of_two(s[i, 2] - other)
            s[i, 3] = ptx.power_of_two(s[i, 3] - other)
            here += s[i, 0] + s[i, 1]
            there += s[i, 2] + s[i, 3]
        top[0], top[1] = first, second
        total[0] = total[0] * shrink + here
        total[1] = total[1] * shrink_other + there
        return shrink, shrink_other

    return softmax


_end_row = row_ender(ptx.power_of_two, math.log2, math.log(2))


@cache
def _finisher(form: _Form) -> Any:
    put, head_size, has_sinks = ptx.put_two(form.out_in_bf16), form.head_size, form.has_sinks

    @device
    def finish(out, lse, o, top, total, query, head, last, n_queries, n_heads, sinks):
        """The sums of both rows become their results."""
        sink = sinks[head] * LOG2_E if has_sinks else MINUS_INF
        share, log_sum = _end_row(top[0], quad_sum(total[0]), sink)
        other, log_of_other = _end_row(top[1], quad_sum(total[1]), sink)
        if cuda.threadIdx.x & 3 == 0:
            at = np.int64(head) * n_queries + query
            if query < last:
                lse[at] = log_sum
            if query + 8 < last:
                lse[at + 8] = log_of_other
        scale_rows(o, head_size // 8, share, other)
        write_rows(out, o, query, last, head, n_heads, head_size, put, 0)

    return finish


@device
def _rows_of_all(span, number, n):
    return number * BR, min((number + 1) * BR, n)


@device
def _begin(top, total, starts, stops, span, query, first, last, n_keys):
    """Of a lane's rows g and g + 8, of which those before `last` are there, the keys that they see;
    returns those that any row sees."""
    for r in range(2):
        top[r], total[r], starts[r], stops[r] = MINUS_INF, ZERO, 0, 0
        if query + 8 * r < last:
            starts[r], stops[r] = keys_of_query(span, query + 8 * r, n_keys)
    return seen_by_rows(span, first, last - first, n_keys)


@cache
def _kernel(form: _Form) -> Any:
    head_size, n, in_groups = form.head_size, form.keys, form.in_groups
    copy_queries, copy_keys = (tile_copier(rows, head_size, in_groups) for rows in (BR, n))
    hold, softmax, finish = rows_holder(head_size, 1), _softmax(n, form.has_cap), _finisher(form)
    scores = rows_multiplier(head_size, n, in_groups, 1, True, form.kind)
    add_values = sums_adder(head_size, n, in_groups, form.kind)
    await_all_but_one = (group_ptx if in_groups else ptx).await_all_but_one
    at_keys = 2 * head_size * BR if in_groups else 0
    at_values = at_keys + n * head_size * 2
    n_bytes = max(2 * head_size * BR, at_values + n * head_size * 2)
    of_sums, of_scores, of_query = (head_size // 8, 4), (n // 8, 4), (head_size // 16, 4)
    rows_of_tile = rows_of_sequences if (of_caches := form.kind == F16.name) else _rows_of_all

    @kernel
    def forward(out, lse, q, k, v, span, sinks, sizes, factors):
        tile = cuda.shared.array(n_bytes, np.uint8, ALIGNED)
        s, o = cuda.local.array(of_scores, np.float32), cuda.local.array(of_sums, np.float32)
        held = cuda.local.array(of_query, np.uint32)
        top, total = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        starts, stops = cuda.local.array(2, np.int32), cuda.local.array(2, np.int32)
        head, (n_queries, n_keys, n_heads, n_key_heads) = cuda.blockIdx.x, sizes
        key_head = head // (n_heads // n_key_heads)
        number = longest_first(cuda.blockIdx.y, cuda.gridDim.y)
        follow()
        while True:
            first, last = rows_of_tile(span, number, n_queries)
            if first == last:
                break
            query = first + 16 * (cuda.threadIdx.x >> 5) + ((cuda.threadIdx.x & 31) >> 2)
            copy_queries(tile, 0, q, first, head, last, n_heads)
            ptx.commit_copies()
            start, stop = _begin(top, total, starts, stops, span, query, first, last, n_keys)
            clear(o, head_size // 8)
            if not in_groups:
                hold((held,), tile)
            copy_keys(tile, at_keys, k, start, key_head, n_keys, n_key_heads)
            ptx.commit_copies()
            for key in range(start, stop, n):
                copy_keys(tile, at_values, v, key, key_head, n_keys, n_key_heads)
                ptx.commit_copies()
                await_all_but_one()
                cuda.syncthreads()
                scores((s,), (held,), tile, (at_keys,))
                cuda.syncthreads()
                copy_keys(tile, at_keys, k, key + n, key_head, n_keys, n_key_heads)
                ptx.commit_copies()
                shrink, other = softmax(s, top, total, starts, stops, key, factors[0], factors[1])
                await_all_but_one()
                cuda.syncthreads()
                scale_rows(o, head_size // 8, shrink, other)
                add_values(o, s, tile, at_values)
                cuda.syncthreads()
            ptx.await_copies()
            finish(out, lse, o, top, total, query, head, last, n_queries, n_heads, sinks)
            if not of_caches:
                break
            cuda.syncthreads()
            number += cuda.gridDim.y

    return follower(forward)


def in_bf16(site: CudaSite, *which: int) -> tuple[list[Any], list[Call], Any]:
    """(the sources of these positions in bfloat16, the calls that round them, scratch left)."""
    arrays, calls, at = [], [], 0
    for i in which:
        if site.node.src[i].dtype is BF16:
            arrays.append(site.src[i])
            continue
        n = site.node.src[i].n_elements
        arrays.append(site.scratch[at : at + 2 * n].view(np.uint16))
        calls.append(round_to_bfloat16(arrays[-1], site.src[i], site.stream))
        at += round_up(2 * n, ALIGNMENT)
    return arrays, calls, site.scratch[at:]


def scratch_in_bf16(node: Tensor, *which: int) -> int:
    to_round = (t for t in (node.src[i] for i in which) if t.dtype is not BF16)
    return sum(round_up(2 * t.n_elements, ALIGNMENT) for t in to_round)


def scratch(node: Tensor, compute: Compute) -> int:
    return scratch_in_bf16(node, 0, 1, 2)


def bind(site: CudaSite) -> Call:
    arrays, calls, _ = in_bf16(site, 0, 1, 2)
    in_bfloat16, in_groups = site.node.dtype is BF16, group_ptx.groups_multiply()
    form = _Form(site.node.shape[2], BF16.name, in_bfloat16, False, False, in_groups)
    return in_turn(*calls, _launch(site, form, arrays))


def scratch_of_cache(node: Tensor, compute: Compute) -> int:
    return 2 * node.src[0].n_elements


def bind_cache(site: CudaSite) -> Call:
    node = site.node
    q = site.scratch[: 2 * node.src[0].n_elements].view(np.float16)
    form = _Form(node.shape[2], F16.name, False, node.params["cap"] > 0, len(node.src) > 4)
    arrays = [x.view(np.uint16) for x in (q, *site.src[1:3])]
    return in_turn(round_to_float16(q, site.src[0], site.stream), _launch(site, form, arrays))


def _launch(site: CudaSite, form: _Form, arrays: list[Any]) -> Call:
    node, p = site.node, site.node.params
    (n_queries, n_heads, _), (n_keys, n_key_heads, _) = node.shape, node.src[1].shape
    sinks = site.src[4] if form.has_sinks else site.saved[0]
    factors = np.float32(p["scale"] * float(LOG2_E)), np.float32(p["cap"] * float(LOG2_E))
    n_tiles = -(-n_queries // BR) + (_MORE_TILES if form.kind == F16.name else 0)
    return launch(
        _kernel(form), (n_heads, n_tiles), THREADS, site.stream, site.out, site.saved[0], *arrays,
        site.src[3], sinks, (n_queries, n_keys, n_heads, n_key_heads), factors,
    )  # fmt: skip
