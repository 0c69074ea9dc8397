"""The path `amx`, backward: gradients of attention on Intel's tile registers.

The formulas are those of `flash`. All factors are rounded to bfloat16, as there. Those of the
scores are too: training has kept in bfloat16 what q and k are computed from. A task takes one head;
if there are few heads, every n-th tile of its queries. It sums dk and dv in memory of its own. A
last stage adds these sums up.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Ints2, Shorts3
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import dot, fill
from pyggml.jit.tasks import stage, task_code
from pyggml.kernels.attention.amx import (
    PAD,
    common_arrays,
    launch_seen,
    pack,
    pairs_task,
    takes,
    transposed_task,
)
from pyggml.kernels.attention.amx_softmax import ScoreBlock, softmax_rows_back
from pyggml.kernels.attention.amx_tile import (
    BC,
    BR,
    HI,
    LDP,
    LDS,
    add_to_keys,
    add_to_queries,
    columns_of,
    key_window,
    load_rows,
    pair_tile,
    pairs_array,
    panel_width,
    scores,
    transposed_array,
)
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Backward
from pyggml.kernels.attention.softmax import ZERO, group_ranges
from pyggml.kernels.gemm.amx.rows import panel_bytes
from pyggml.kernels.gemm.amx.tiles import SIDE, STEP, configure, release
from pyggml.sizes import round_up

FEWEST_TASKS = 16  # if there are tiles enough


class BackwardTiles(Frame):
    """Arrays of a backward pass, each task's sums of dk and dv, and each thread's tile."""

    dq: Floats3
    q: Floats3
    do: Floats3
    o: Floats3
    lse: Floats2
    span: Ints2
    scale: Float
    k_transposed: Shorts3
    k_pairs: Shorts3
    v_transposed: Shorts3
    dk_sums: Floats3
    dv_sums: Floats3
    starts: Ints2
    stops: Ints2
    q_rows: Shorts3
    do_rows: Shorts3
    q_pairs: Shorts3
    do_pairs: Shorts3
    s: Floats3
    dp: Floats3
    ds: Shorts3
    columns: Shorts3
    p_pairs: Floats3
    ds_pairs: Floats3
    dq_tile: Floats3
    delta: Floats2
    spare: Floats2


@kernel
def _load_tile(f, head, first, n_rows, thread):
    """The tile's rows of q and do, as rows and as pairs, and δ."""
    q, do, o, spare = f.q, f.do, f.o, f.spare[thread]
    n, width = q.shape[0], f.dq_tile.shape[2]
    q_rows, do_rows = f.q_rows[thread][:n_rows], f.do_rows[thread][:n_rows]
    load_rows(q_rows, q, first, head, n, width, np.int64(HI), np.int64(HI), spare)
    load_rows(do_rows, do, first, head, n, width, np.int64(HI), np.int64(HI), spare)
    pair_tile(f.q_pairs[thread], q_rows, width)
    pair_tile(f.do_pairs[thread], do_rows, width)
    delta = f.delta[thread]
    for i in range(min(BR, n - first)):
        delta[i] = dot(do[first + i, head], o[first + i, head])
    return q_rows, do_rows


@kernel
def _backward_tile(f, task, head, first, thread):
    """dq of a tile's queries, and what they add to dk and dv."""
    key_head = head // (f.q.shape[1] // f.k_pairs.shape[0])
    n = min(BR, f.q.shape[0] - first)
    n_groups = (n + SIDE - 1) // SIDE
    starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
    q_rows, do_rows = _load_tile(f, head, first, n_groups * SIDE, thread)
    s, dp = f.s[thread][: n_groups * SIDE], f.dp[thread][: n_groups * SIDE]
    ds, columns = f.ds[thread], f.columns[thread]
    p_pairs, ds_pairs = f.p_pairs[thread], f.ds_pairs[thread]
    dq_tile, delta = f.dq_tile[thread], f.delta[thread]
    n_steps = dq_tile.shape[1] // STEP
    for i in range(n_groups * SIDE):
        fill(dq_tile[i], ZERO)
    start, stop = group_ranges(starts, stops, f.span, first, SIDE)
    for key in range(start // BC * BC, stop, BC):
        window = key_window(start, stop, key)
        block = ScoreBlock(f.span, first, key, window)
        scores(s, q_rows, f.k_transposed[key_head], key, n_steps, starts, stops)
        scores(dp, do_rows, f.v_transposed[key_head], key, n_steps, starts, stops)
        softmax_rows_back(ds, p_pairs, ds_pairs, s, dp, f.lse[head], delta, block, f.scale)
        add_to_queries(dq_tile, ds, f.k_pairs[key_head], key, starts, stops)
        columns_of(columns, ds_pairs, window, s.shape[0])
        add_to_keys(f.dk_sums[task], columns, f.q_pairs[thread], key, window, starts, stops)
        columns_of(columns, p_pairs, window, s.shape[0])
        add_to_keys(f.dv_sums[task], columns, f.do_pairs[thread], key, window, starts, stops)
    for i in range(n):
        to, of = f.dq[first + i, head], dq_tile[i]
        for j in range(to.shape[0]):
            to[j] = of[j] * f.scale


@task_code(BackwardTiles)
def _backward_task(f, task, thread):
    """One head, or every n-th of its tiles, n tasks to a head."""
    n_queries, n_heads, _ = f.q.shape
    parts = f.dk_sums.shape[0] // n_heads
    for sums in (f.dk_sums[task], f.dv_sums[task]):
        for i in range(sums.shape[0]):
            fill(sums[i], ZERO)
    configure()
    for first in range(task % parts * BR, n_queries, parts * BR):
        _backward_tile(f, task, task // parts, first, thread)
    release()


class KeySums(Frame):
    """What all tasks added to the gradients of keys or values."""

    gradient: Floats3
    sums: Floats3
    scale: Float


@task_code(KeySums)
def _keys_task(f, task, thread):
    """BC rows of one key head."""
    n_keys, n_heads, d = f.gradient.shape
    n_blocks = (n_keys + BC - 1) // BC
    head, first = task // n_blocks, task % n_blocks * BC
    repeats = f.sums.shape[0] // n_heads
    for j in range(first, min(first + BC, n_keys)):
        to = f.gradient[j, head]
        fill(to, ZERO)
        for part in range(head * repeats, (head + 1) * repeats):
            of = f.sums[part, j]
            for i in range(d):
                to[i] += of[i] * f.scale


# -- binding --------------------------------------------------------------------------------------


def _backward_layout(problem: AttentionProblem) -> Layout:
    heads, keys, d = problem.n_key_heads, problem.n_keys, problem.head_size
    width, n_tiles = panel_width(d), -(-problem.n_queries // BR)
    n_tasks = problem.n_heads * min(n_tiles, -(-FEWEST_TASKS // problem.n_heads))
    panels = width // SIDE, panel_bytes(BR) // 2
    return Layout(
        **common_arrays(problem, 1),
        k_pairs=pairs_array(heads, keys, d),
        v_transposed=transposed_array(heads, keys, d, 1),
        dk_sums=Array((n_tasks, round_up(keys, BC), width)),
        dv_sums=Array((n_tasks, round_up(keys, BC), width)),
        do_rows=per_thread(BR, width + PAD, dtype=np.uint16),
        q_pairs=per_thread(*panels, dtype=np.uint16),
        do_pairs=per_thread(*panels, dtype=np.uint16),
        dp=per_thread(BR, LDS),
        ds=per_thread(BR, LDP, dtype=np.uint16),
        columns=per_thread(BC, BR + PAD, dtype=np.uint16),
        p_pairs=per_thread(BR // 2, LDS),
        ds_pairs=per_thread(BR // 2, LDS),
        dq_tile=per_thread(BR, width),
        delta=per_thread(BR),
    )


def _backward(problem: AttentionProblem, a: Backward, memory: Scratch) -> Call:
    packing = [
        pack(transposed_task, a.k, memory["k_transposed"], 1, memory),
        pack(pairs_task, a.k, memory["k_pairs"], 1, memory),
        pack(transposed_task, a.v, memory["v_transposed"], 1, memory),
    ]
    own = {name: memory[name] for name in memory if name in BackwardTiles.fields}
    f = BackwardTiles(
        dq=a.dq, q=a.q, do=a.do, o=a.o, lse=a.lse, span=a.span, scale=float(a.scale), **own
    )
    stages = [stage(_backward_task, f, len(memory["dk_sums"]))]
    n_tasks = problem.n_key_heads * -(-problem.n_keys // BC)
    for gradient, sums, scale in (
        (a.dk, memory["dk_sums"], a.scale), (a.dv, memory["dv_sums"], np.float32(1))
    ):  # fmt: skip
        stages.append(
            stage(_keys_task, KeySums(gradient=gradient, sums=sums, scale=float(scale)), n_tasks)
        )
    return Call(launch_seen, a.span, packing, tuple(stages))


BACKWARD: AttentionPath[Backward] = AttentionPath("amx", True, takes, _backward_layout, _backward)
