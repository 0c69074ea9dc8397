"""The path `flash`, backward: the gradients of attention in tiles (Dao et al. 2022, 2023).

With P as pyggml.kernels.attention.flash has it, δ_i = do_i·o_i and ds_ij = p_ij (do_i·v_j − δ_i):
dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,   dv_j = Σ_i p_ij do_i

First K and V are packed. A task then takes one head; if there are few heads, some tiles of its
queries. It makes P and dS once for all three gradients, and sums dK and dV of the keys that they
see in memory of its own. A last stage adds these sums up. So no two threads add to the same number,
and no sum depends on the thread that computes it.

With `pairs` the factors of the products are rounded to bfloat16.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Int, Ints2
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import dot, fill
from pyggml.jit.tasks import stage, task_code
from pyggml.kernels.attention.flash import fills_tiles
from pyggml.kernels.attention.pair_softmax import LDP, softmax_pairs_back
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Backward
from pyggml.kernels.attention.softmax import ZERO, group_ranges, softmax_tile_back
from pyggml.kernels.attention.tile_products import add_to_keys, add_to_queries, key_window, scores
from pyggml.kernels.attention.tiles import (
    BC,
    BR,
    LDS,
    MR,
    N_GROUPS,
    PANEL,
    Packings,
    load_rows,
    pack,
    packed_array,
    packed_transposed_array,
    panel_width,
    row_words,
    spare_array,
)
from pyggml.kernels.gemm import rounds
from pyggml.kernels.gemm.panels import LANES, rounded_up, split
from pyggml.sizes import round_up

FEWEST_TASKS = 16  # if there are enough tiles


class FlashBackward(Frame):
    """A task takes one head, or some tiles of its queries, with as many tasks for each head."""

    dq: Floats3
    q: Floats3
    do: Floats3
    o: Floats3
    lse: Floats2
    span: Ints2
    scale: Float
    packed_kt: Floats3  # Kᵀ
    packed_k: Floats3
    packed_vt: Floats3  # Vᵀ
    sums: Floats3  # rows of dK and dV, two for each task, as long as the longer of both
    summed: Ints2  # of each task, the first of the keys with sums, and the one past the last
    # of each thread
    q_rows: Floats3  # (BR, words)
    do_rows: Floats3
    packed_q: Floats3  # (panels, words)
    packed_do: Floats3
    s: Floats3  # (BR, LDS): S, then P; with pairs of a group of MR queries only
    dp: Floats3  # dP, then dS
    p_pairs: Floats3  # (BR / 2, LDS): pairs of queries
    ds_pairs: Floats3
    ds_key_pairs: Floats3  # (MR, LDP): pairs of keys
    dq_tile: Floats3  # (BR, width)
    lse_tile: Floats2  # of the tile's queries
    delta: Floats2
    starts: Ints2
    stops: Ints2
    spare: Floats2


@kernel
def _load(f, thread, head, first, n, n_rows, pairs):
    """Q and dO of a tile, as first and as second operands, lse and δ."""
    for x, rows, packed in (
        (f.q, f.q_rows[thread], f.packed_q[thread]),
        (f.do, f.do_rows[thread], f.packed_do[thread]),
    ):
        load_rows(rows[:n_rows], x, first, head, x.shape[0], pairs, f.spare[thread])
        pack(packed, x, first, n_rows, head, x.shape[0], pairs, f.spare[thread])
    delta, lse = f.delta[thread], f.lse_tile[thread]
    for i in range(n):
        delta[i] = dot(f.do[first + i, head], f.o[first + i, head])
        lse[i] = f.lse[head, first + i]
    for i in range(n, n_rows):
        lse[i] = ZERO


@kernel
def _tiles_of(span, part, n_parts):
    """The tiles of queries of one of a head's tasks: the first, an end, and the step. Where many
    sequences are short, neighbours, which see few keys; else every n-th, which see equally many."""
    n_queries, longest = span.shape[0], np.int64(0)
    n_tiles = (n_queries + BR - 1) // BR
    for i in range(n_queries):
        longest = max(longest, np.int64(span[i, 1]) - span[i, 0])
    if longest * n_parts > n_queries:
        return part, n_tiles, n_parts
    first, last = split(n_tiles, n_parts, part)
    return first, last, 1


@kernel
def _begin_sums(f, task, tiles):
    """Zeros for the keys that a task's tiles see, in whole tiles, and the last group beyond."""
    first, stop, span = f.span.shape[0], 0, f.span
    for tile in range(tiles[0], tiles[1], tiles[2]):
        for i in range(tile * BR, min((tile + 1) * BR, span.shape[0])):
            if span[i, 0] < span[i, 1]:
                first, stop = min(first, span[i, 0]), max(stop, span[i, 1])
    first = min(first, stop) // BC * BC
    stop = min(rounded_up(stop, BC) + MR, f.sums.shape[1]) if stop else 0
    f.summed[task, 0], f.summed[task, 1] = first, stop
    for i in range(2):
        fill(f.sums[2 * task + i, first:stop].reshape(-1), ZERO)


@kernel
def _group_gradients(f, thread, key_head, first, i, key, window, pairs):
    """P and dS of the group of queries at row i of a tile, while they are in the first cache, and
    what they add to dQ."""
    g, at = i // MR, 0 if pairs else i
    starts, stops = f.starts[thread][g : g + 1], f.stops[thread][g : g + 1]
    s, dp = f.s[thread][at : at + MR], f.dp[thread][at : at + MR]
    lse, delta = f.lse_tile[thread][i : i + MR], f.delta[thread][i : i + MR]
    q, do = f.q_rows[thread][i : i + MR], f.do_rows[thread][i : i + MR]
    scores(s, q, f.packed_kt[key_head], key, starts, stops, pairs)
    scores(dp, do, f.packed_vt[key_head], key, starts, stops, pairs)
    ds = dp
    if pairs:
        ds = f.ds_key_pairs[thread]
        softmax_pairs_back(
            ds, f.p_pairs[thread][i // 2 :], f.ds_pairs[thread][i // 2 :], s, dp, lse, delta,
            f.span, first + i, key, window, starts, stops, f.scale,
        )  # fmt: skip
    else:
        softmax_tile_back(s, dp, lse, delta, f.span, first + i, key, BC, window, f.scale)
    dq = f.dq_tile[thread][i : i + MR]
    add_to_queries(dq, ds, f.packed_k[key_head], key, starts, stops, pairs)


def _backward_code(pairs: bool) -> Code:
    """The task with or without `pairs`; only what a process needs is compiled."""
    rounded = np.bool_(pairs)

    @task_code(FlashBackward)
    def backward_task(f, task, thread):
        """dQ of tiles of queries; their share of dK and dV is added to the task's sums. It calls no
        kernel made here, as in `flash`."""
        n_parts = f.sums.shape[0] // 2 // f.q.shape[1]  # tasks of a head
        head = task // n_parts
        span, key_head = f.span, head // (f.q.shape[1] // f.packed_k.shape[0])
        tiles = _tiles_of(span, task % n_parts, n_parts)
        _begin_sums(f, task, tiles)
        for tile in range(tiles[0], tiles[1], tiles[2]):
            first, n = tile * BR, min(BR, f.q.shape[0] - tile * BR)
            n_groups = (n + MR - 1) // MR
            n_rows = n_groups * MR
            starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
            dq, dk, dv = f.dq_tile[thread][:n_rows], f.sums[2 * task], f.sums[2 * task + 1]
            _load(f, thread, head, first, n, n_rows, rounded)
            fill(dq.reshape(-1), ZERO)
            start, stop = group_ranges(starts, stops, span, first, MR)
            for key in range(start // BC * BC, stop, BC):
                window = key_window(start, stop, key)
                for i in range(0, n_rows, MR):
                    _group_gradients(f, thread, key_head, first, i, key, window, rounded)
                p, ds = f.s[thread], f.dp[thread]
                if rounded:
                    p, ds = f.p_pairs[thread], f.ds_pairs[thread]
                add_to_keys(dk, ds, f.packed_q[thread], key, window, starts, stops, rounded)
                add_to_keys(dv, p, f.packed_do[thread], key, window, starts, stops, rounded)
            for i in range(n):
                to, of = f.dq[first + i, head], dq[i]
                for j in range(to.shape[0]):
                    to[j] = of[j] * f.scale

    return backward_task


_BACKWARD = {pairs: _backward_code(pairs) for pairs in (False, True)}


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


def n_tasks(p: AttentionProblem) -> int:
    """Tasks of the pass: equally many for each head."""
    return p.n_heads * min(-(-p.n_queries // BR), -(-FEWEST_TASKS // p.n_heads))


def _layout(p: AttentionProblem) -> Layout:
    d, dv, pairs = p.head_size, p.value_size, rounds(p.compute)
    keys, values = ((p.n_key_heads, p.n_keys, size, pairs) for size in (d, dv))
    depth = (BR // 2 if pairs else BR) * PANEL
    if_pairs = 1 if pairs else 0
    return Layout(
        packed_kt=packed_transposed_array(*keys),
        packed_k=packed_array(*keys),
        packed_vt=packed_transposed_array(*values),
        sums=Array((2 * n_tasks(p), round_up(p.n_keys, BC) + MR, panel_width(max(d, dv)))),
        summed=Array((n_tasks(p), 2), np.int32),
        q_rows=per_thread(BR, row_words(d, pairs)),
        do_rows=per_thread(BR, row_words(dv, pairs)),
        packed_q=per_thread(panel_width(d) // PANEL, depth),
        packed_do=per_thread(panel_width(dv) // PANEL, depth),
        s=per_thread(MR if pairs else BR, LDS),
        dp=per_thread(MR if pairs else BR, LDS),
        p_pairs=per_thread(if_pairs * BR // 2, LDS),
        ds_pairs=per_thread(if_pairs * BR // 2, LDS),
        ds_key_pairs=per_thread(if_pairs * MR, LDP),
        dq_tile=per_thread(BR, panel_width(d)),
        lse_tile=per_thread(round_up(BR, LANES)),
        delta=per_thread(round_up(BR, LANES)),
        starts=per_thread(round_up(N_GROUPS, LANES), dtype=np.int32),
        stops=per_thread(round_up(N_GROUPS, LANES), dtype=np.int32),
        spare=spare_array(max(d, dv), pairs),
    )


def _bind(p: AttentionProblem, a: Backward, scratch: Scratch) -> Call:
    pairs = rounds(p.compute)
    packings = Packings(a.span, pairs, scratch["spare"])
    packings.pack_transposed(a.k, scratch["packed_kt"])
    packings.pack(a.k, scratch["packed_k"])
    packings.pack_transposed(a.v, scratch["packed_vt"])
    f = FlashBackward(
        dq=a.dq, q=a.q, do=a.do, o=a.o, lse=a.lse, span=a.span, scale=float(a.scale),
        **scratch,
    )  # fmt: skip
    sums = {name: scratch[name] for name in ("sums", "summed")}
    repeats = n_tasks(p) // p.n_key_heads
    keys = KeyGradients(dk=a.dk, dv=a.dv, scale=float(a.scale), repeats=repeats, **sums)
    return packings.then(
        stage(_BACKWARD[pairs], f, n_tasks(p)),
        stage(_keys_task, keys, p.n_key_heads * -(-p.n_keys // BC)),
    )


BACKWARD: AttentionPath[Backward] = AttentionPath("flash", True, fills_tiles, _layout, _bind)
