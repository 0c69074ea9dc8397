"""The gradients of attention in tiles (Dao et al. 2022, 2023), whatever the tiles are.

With P as pyggml.kernels.attention.tiled has it, δ_i = do_i·o_i and ds_ij = p_ij (do_i·v_j − δ_i):
dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,   dv_j = Σ_i p_ij do_i

First K and V are packed. A task then takes one head; if there are few heads, some tiles of its
queries. It makes P and dS once for all three gradients, and sums dK and dV of the keys that they
see in memory of its own. A last stage adds these sums up. So no two threads add to the same number,
and no sum depends on the thread that computes it.
"""

from collections.abc import Callable

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Int, Ints2
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import dot, fill
from pyggml.jit.tasks import stage, task_code, whole
from pyggml.kernels.attention.pair_softmax import softmax_pairs_back
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Backward
from pyggml.kernels.attention.softmax import BC, ZERO, ScoreBlock, columns_in, group_ranges
from pyggml.kernels.attention.tile_products import add_to_keys, add_to_queries, scores
from pyggml.kernels.attention.tiles import (
    AttentionTiles,
    TileSizes,
    arrays_of_tile,
    bind_tiles,
    call_of,
    queries_from,
)
from pyggml.kernels.gemm.panels import LANES, rounded_up, split
from pyggml.sizes import round_up

FEWEST_TASKS = 16  # if there are enough tiles


class BackwardTiles(AttentionTiles):
    """A task takes one head, or some tiles of its queries, with as many tasks for each head. Of its
    kind are the kernels

    load(f, rows, packed, x, first, n_rows, head, spare)   rows of a tile of x, as both operands
    softmax_back(f, thread, i, s, dp, block, starts, stops)   P and dS of the queries at row i; dS
    key_weights(f, thread, which, window, n_rows)   dS (0) or P (1) of a tile, and its steps from
                                                    key to key and along the queries
    """

    WRITTEN = ("dq", "sums", "summed")
    dq: Floats3
    do: Floats3
    sums: Floats3  # rows of dK and dV, two for each task, as long as the longer of both
    summed: Ints2  # of each task, the first of the keys with sums, and the one past the last
    # of each thread
    do_rows: Floats3
    packed_q: Floats3
    packed_do: Floats3
    dp: Floats3  # as s: dO·Vᵀ
    dq_tile: Floats3
    log_sums: Floats2  # of the tile's queries: lse
    delta: Floats2


class PairGradients(BackwardTiles):
    """Those of a kind whose P and dS are bfloat16. Of each thread:"""

    ds: Floats3  # pairs of keys
    p_pairs: Floats3  # pairs of queries
    ds_pairs: Floats3

    @kernel
    def softmax_back(f, thread, i, s, dp, block, starts, stops):
        ds, lse, delta = f.ds[thread], f.log_sums[thread][i:], f.delta[thread][i:]
        p_pairs, ds_pairs = f.p_pairs[thread][i // 2 :], f.ds_pairs[thread][i // 2 :]
        group, step = f.sizes().group, max(f.sizes().step, f.sizes().lanes)
        softmax_pairs_back(ds, p_pairs, ds_pairs, s, dp, lse, delta, block, starts, stops, group,
                           step, f.scale)  # fmt: skip
        return ds


def own_of_pairs(sizes: TileSizes) -> dict[str, tuple[int, int]]:
    """What PairGradients has of each thread."""
    pairs = dict.fromkeys(("p_pairs", "ds_pairs"), (sizes.queries // 2, sizes.lds))
    return pairs | {"ds": (sizes.together, sizes.ldp)}


@kernel
def _tiles_of(span, n_queries, part, n_parts):
    """The tiles of queries of one of a head's tasks: the first, an end, and the step. Where many
    sequences are short, neighbours, which see few keys; else every n-th, which see equally many."""
    longest = np.int64(0)
    n_tiles = (span.shape[0] + n_queries - 1) // n_queries
    for i in range(span.shape[0]):
        longest = max(longest, np.int64(span[i, 1]) - span[i, 0])
    if longest * n_parts > span.shape[0]:
        return part, n_tiles, n_parts
    first, last = split(n_tiles, n_parts, part)
    return first, last, 1


@kernel
def _begin_sums(f, task, tiles):
    """Zeros for the keys that a task's tiles see, in whole tiles, and the last group beyond."""
    first, stop, span, n = f.span.shape[0], 0, f.span, f.sizes().queries
    for tile in range(tiles[0], tiles[1], tiles[2]):
        for i in range(tile * n, min((tile + 1) * n, span.shape[0])):
            if span[i, 0] < span[i, 1]:
                first, stop = min(first, span[i, 0]), max(stop, span[i, 1])
    first = min(first, stop) // BC * BC
    stop = min(rounded_up(stop, BC) + f.sizes().group, f.sums.shape[1]) if stop else 0
    f.summed[task, 0], f.summed[task, 1] = first, stop
    for i in range(2):
        fill(f.sums[2 * task + i, first:stop].reshape(-1), ZERO)


@kernel
def _load_sums(f, thread, head, first, n, n_rows):
    """lse and δ of a tile; 0 past the last query."""
    delta, log_sums = f.delta[thread], f.log_sums[thread]
    for i in range(n):
        delta[i] = dot(f.do[first + i, head], f.o[first + i, head])
        log_sums[i] = f.lse[head, first + i]
    for i in range(n, n_rows):
        delta[i] = log_sums[i] = ZERO


@kernel
def _meet(f, task, thread, key_head, block, starts, stops, dq):
    """A tile of keys: P and dS, dq += dS·K, some queries at a time; then the sums of dK and dV."""
    n, key = f.sizes().together, block.key
    for i in range(0, dq.shape[0], n):
        own, start, stop = queries_from(f.common, block, starts, stops, i)
        at, dq_here = i % f.s.shape[1], dq[i : i + n]
        s, dp = f.s[thread][at : at + dq_here.shape[0]], f.dp[thread][at : at + dq_here.shape[0]]
        scores(f.common, s, f.q_rows[thread][i:], f.packed_kt[key_head], key, start, stop)
        scores(f.common, dp, f.do_rows[thread][i:], f.packed_vt[key_head], key, start, stop)
        ds = f.softmax_back(thread, i, s, dp, own, start, stop)
        add_to_queries(f.common, dq_here, ds, f.packed_k[key_head], key, start, stop)
    for which, packed in enumerate((f.packed_q[thread], f.packed_do[thread])):
        weights, row, step = f.key_weights(thread, which, block.window, dq.shape[0])
        sums = f.sums[2 * task + which]
        add_to_keys(f.common, sums, weights, row, step, packed, block, starts, stops)


@kernel
def _tile(f, task, thread, head, first):
    """dQ of a tile of queries; its share of dK and dV is added to the task's sums."""
    group, spare, common = f.sizes().group, f.spare[thread], f.common
    n = min(f.sizes().queries, f.q.shape[0] - first)
    n_groups = (n + group - 1) // group
    n_rows = n_groups * group
    starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
    dq = f.dq_tile[thread][:n_rows]
    _load_sums(f, thread, head, first, n, n_rows)
    common.load(f.q_rows[thread][:n_rows], f.packed_q[thread], f.q, first, n_rows, head, spare)
    common.load(f.do_rows[thread][:n_rows], f.packed_do[thread], f.do, first, n_rows, head, spare)
    fill(dq.reshape(-1), ZERO)
    start, stop = group_ranges(starts, stops, f.span, first, group)
    for key in range(start // BC * BC, stop, BC):
        block = ScoreBlock(f.span, first, key, columns_in(start, stop, key, group))
        _meet(f, task, thread, head // f.repeats, block, starts, stops, dq)
    for i in range(n):
        to, of = f.dq[first + i, head], dq[i]
        for j in range(to.shape[0]):
            to[j] = of[j] * f.scale


def _backward_task(f, task, thread):
    n_parts = f.sums.shape[0] // 2 // f.q.shape[1]  # tasks of a head
    tiles = _tiles_of(f.span, f.sizes().queries, task % n_parts, n_parts)
    _begin_sums(f, task, tiles)
    f.begin(thread)
    for tile in range(tiles[0], tiles[1], tiles[2]):
        _tile(f, task, thread, task // n_parts, tile * f.sizes().queries)
    f.end(thread)


class KeyGradients(Frame):
    """A task makes dK and dV of BC keys of one key head: the sums of all tasks of this head."""

    dk: Floats3
    dv: Floats3
    sums: Floats3
    summed: Ints2
    scale: Float
    repeats: Int  # tasks to a key head


@kernel
def _add_up(to, f, which, first, key, factor):
    """to (D,) = factor · Σ of dK or dV at one key, over the tasks from `first` on that see it."""
    begun = False
    for task in range(first, first + f.repeats):
        if f.summed[task, 0] <= key < f.summed[task, 1]:
            of = f.sums[2 * task + which, key]
            if begun:
                for i in range(to.shape[0]):
                    to[i] += of[i] * factor
            else:
                for i in range(to.shape[0]):
                    to[i] = of[i] * factor
            begun = True
    if not begun:
        fill(to, ZERO)


@task_code(KeyGradients)
def _keys_task(f, task, thread):
    n_keys = f.dk.shape[0]
    n_tiles = (n_keys + BC - 1) // BC
    head, first = task // n_tiles, task % n_tiles * BC
    tasks = head * f.repeats
    for j in range(first, min(first + BC, n_keys)):
        _add_up(f.dk[j, head], f, np.int64(0), tasks, j, f.scale)
    for j in range(first, min(first + BC, n_keys)):
        _add_up(f.dv[j, head], f, np.int64(1), tasks, j, np.float32(1))


# -- binding ------------------------------------------------------------------------------------


def n_tasks(tiles: type[BackwardTiles], p: AttentionProblem) -> int:
    """Tasks of the pass: equally many for each head."""
    return p.n_heads * min(-(-p.n_queries // tiles.SIZES.queries), -(-FEWEST_TASKS // p.n_heads))


def _layout(tiles: type[BackwardTiles], p: AttentionProblem) -> Layout:
    sizes, d, dv = tiles.SIZES, p.head_size, p.value_size
    n, keys = n_tasks(tiles, p), round_up(p.n_keys, BC) + sizes.group
    return Layout(
        **{"dp": per_thread(sizes.together, sizes.lds)} | arrays_of_tile(tiles, p),
        packed_k=sizes.packed_keys(p, d),
        packed_vt=sizes.transposed_keys(p, dv),
        do_rows=sizes.rows(dv),
        packed_q=per_thread(*sizes.panel_shape(sizes.queries, d)),
        packed_do=per_thread(*sizes.panel_shape(sizes.queries, dv)),
        sums=Array((2 * n, keys, sizes.width(max(d, dv)))),
        summed=Array((n, 2), np.int32),
        dq_tile=per_thread(sizes.queries, sizes.width(d)),
        **dict.fromkeys(("log_sums", "delta"), per_thread(round_up(sizes.queries, LANES))),
    )


def tiled_backward(
    name: str,
    tiles_of: Callable[[AttentionProblem], type[BackwardTiles]],
    takes: Callable[[AttentionProblem], bool],
) -> AttentionPath[Backward]:
    """The path of the kind of tiles that a problem has."""

    def layout(p: AttentionProblem) -> Layout:
        return _layout(tiles_of(p), p)

    def bind(p: AttentionProblem, a: Backward, scratch: Scratch) -> Call:
        tiles = tiles_of(p)
        f, n = bind_tiles(tiles, p, a, scratch, do=a.do, dq=a.dq), n_tasks(tiles, p)
        keys = KeyGradients(
            dk=a.dk, dv=a.dv, scale=float(a.scale), repeats=n // p.n_key_heads,
            sums=scratch["sums"], summed=scratch["summed"],
        )  # fmt: skip
        reads, writes = (whole(scratch[x]) for x in ("sums", "summed")), (a.dk, a.dv)
        add_up = stage(
            _keys_task, keys, p.n_key_heads * -(-p.n_keys // BC), *reads,
            *(whole(x, False) for x in writes),
        )  # fmt: skip
        return call_of(layout(p), scratch, p, _backward_task, f, n, add_up)

    return AttentionPath(name, True, takes, layout, bind)
