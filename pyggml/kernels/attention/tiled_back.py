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
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Int, Ints2
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import dot, fill
from pyggml.jit.tasks import task_code
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Backward
from pyggml.kernels.attention.softmax import BC, ZERO, ScoreBlock, columns_in, group_ranges
from pyggml.kernels.attention.tiled import AttentionTiles, Pack, arrays_of_tile, bind_tiles, call_of
from pyggml.kernels.gemm.panels import LANES, rounded_up, split
from pyggml.sizes import round_up

FEWEST_TASKS = 16  # if there are enough tiles


class BackwardTiles(AttentionTiles):
    """A task takes one head, or some tiles of its queries, with as many tasks for each head. The
    kernels of a kind are

    load(f, thread, head, first, n_rows)                        Q and dO of a tile
    meet(f, task, thread, key_head, block, starts, stops, dq)   of a tile of keys: P, dS, dq += dS·K
                                                                and the task's sums of dK and dV
    """

    WRITTEN = ("dq", "sums", "summed")
    dq: Floats3
    do: Floats3
    sums: Floats3  # rows of dK and dV, two for each task, as long as the longer of both
    summed: Ints2  # of each task, the first of the keys with sums, and the one past the last
    # of each thread
    dp: Floats3  # as s: dO·Vᵀ
    dq_tile: Floats3  # (QUERIES, width)
    log_sums: Floats2  # of the tile's queries: lse
    delta: Floats2


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
    first, stop, span = f.span.shape[0], 0, f.span
    for tile in range(tiles[0], tiles[1], tiles[2]):
        for i in range(tile * f.n_queries, min((tile + 1) * f.n_queries, span.shape[0])):
            if span[i, 0] < span[i, 1]:
                first, stop = min(first, span[i, 0]), max(stop, span[i, 1])
    first = min(first, stop) // BC * BC
    stop = min(rounded_up(stop, BC) + f.group, f.sums.shape[1]) if stop else 0
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
def _tile(f, task, thread, head, first):
    """dQ of a tile of queries; its share of dK and dV is added to the task's sums."""
    n = min(f.n_queries, f.q.shape[0] - first)
    n_groups = (n + f.group - 1) // f.group
    n_rows = n_groups * f.group
    starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
    dq = f.dq_tile[thread][:n_rows]
    _load_sums(f, thread, head, first, n, n_rows)
    f.load(thread, head, first, n_rows)
    fill(dq.reshape(-1), ZERO)
    start, stop = group_ranges(starts, stops, f.span, first, f.group)
    for key in range(start // BC * BC, stop, BC):
        block = ScoreBlock(f.span, first, key, columns_in(start, stop, key, f.group))
        f.meet(task, thread, head // f.repeats, block, starts, stops, dq)
    for i in range(n):
        to, of = f.dq[first + i, head], dq[i]
        for j in range(to.shape[0]):
            to[j] = of[j] * f.scale


def _backward_task(f, task, thread):
    n_parts = f.sums.shape[0] // 2 // f.q.shape[1]  # tasks of a head
    tiles = _tiles_of(f.span, f.n_queries, task % n_parts, n_parts)
    _begin_sums(f, task, tiles)
    f.begin(thread)
    for tile in range(tiles[0], tiles[1], tiles[2]):
        _tile(f, task, thread, task // n_parts, tile * f.n_queries)
    f.end(thread)


class KeyGradients(Frame):
    """A task makes dK and dV of BC keys of one key head: the sums of all tasks of this head."""

    WRITTEN = ("dk", "dv")
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
    return p.n_heads * min(-(-p.n_queries // tiles.QUERIES), -(-FEWEST_TASKS // p.n_heads))


_CODES: dict[type, Code] = {}  # by the kind of tiles


def _code_of(tiles: type[BackwardTiles]) -> Code:
    if tiles not in _CODES:
        _CODES[tiles] = task_code(tiles)(_backward_task)
    return _CODES[tiles]


def tiled_backward(
    name: str,
    tiles_of: Callable[[AttentionProblem], type[BackwardTiles]],
    takes: Callable[[AttentionProblem], bool],
    arrays: Callable[[AttentionProblem], dict[str, Array]],
    pack: Pack,
    width: Callable[[int], int],
) -> AttentionPath[Backward]:
    """The path of the kind of tiles that a problem has; arrays: its scratch; width: of a row of so
    many results."""

    def layout(p: AttentionProblem) -> Layout:
        tiles, longest = tiles_of(p), max(p.head_size, p.value_size)
        n, keys = n_tasks(tiles, p), round_up(p.n_keys, BC) + tiles.GROUP
        rows = per_thread(round_up(tiles.QUERIES, LANES))
        return Layout(
            **arrays_of_tile(tiles),
            **arrays(p),
            sums=Array((2 * n, keys, width(longest))),
            summed=Array((n, 2), np.int32),
            dp=per_thread(*tiles.SCORES),
            dq_tile=per_thread(tiles.QUERIES, width(p.head_size)),
            **dict.fromkeys(("log_sums", "delta"), rows),
        )

    def bind(p: AttentionProblem, a: Backward, scratch: Scratch) -> Call:
        tiles = tiles_of(p)
        f = bind_tiles(tiles, p, a, scratch, do=a.do, dq=a.dq)
        keys = KeyGradients(
            dk=a.dk, dv=a.dv, scale=float(a.scale), repeats=n_tasks(tiles, p) // p.n_key_heads,
            sums=scratch["sums"], summed=scratch["summed"],
        )  # fmt: skip
        return call_of(
            layout(p), scratch, pack(p, a, scratch), (_code_of(tiles), f, n_tasks(tiles, p)),
            (_keys_task, keys, p.n_key_heads * -(-p.n_keys // BC)),
        )  # fmt: skip

    return AttentionPath(name, True, takes, layout, bind)
