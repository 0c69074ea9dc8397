"""The path `amx`, forward: attention in tiles, its products on Intel's tile registers.

The formulas are those of `flash`. Scores are made of split numbers, nearly as exact as float32; the
other products round their factors to bfloat16, as those with weights do.

Keys and values are packed first. A task then takes a tile's queries of one head.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Int, Ints2, Shorts3
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import TaskStage, launch, stage, task_code
from pyggml.kernels.attention.amx_softmax import ScoreBlock, softmax_rows
from pyggml.kernels.attention.amx_tile import (
    BC,
    BR,
    LDP,
    LDS,
    N_GROUPS,
    PARTS,
    add_to_queries,
    key_window,
    load_rows,
    pairs_array,
    panel_width,
    scores,
    transpose_tile,
    transposed_array,
)
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward
from pyggml.kernels.attention.softmax import MASKED, ZERO, divide_tile, group_ranges
from pyggml.kernels.gemm.amx.rows import LANES, LINE, put_pairs
from pyggml.kernels.gemm.amx.tiles import SIDE, STEP, configure, release
from pyggml.kernels.gemm.panels import rounded_up

PAD = LINE // 2  # numbers between rows of bfloat16: rows a power of two apart meet in few sets

# -- packing keys and values ----------------------------------------------------------------------


class TilePacking(Frame):
    """How an operand (n, heads, D) is packed, BC rows of a head a task."""

    x: Floats3
    packed: Shorts3
    n_used: Int  # rows of x that are read
    n_blocks: Int  # tasks of a head
    parts: Int  # of each number
    rows: Shorts3  # of each thread: LANES rows
    spare: Floats2


@kernel
def _is_seen(f, task):
    """The head and the first row of a task, and whether that row is read."""
    first = task % f.n_blocks * BC
    return task // f.n_blocks, first, first < f.n_used


@kernel
def _load(f, thread, head, first):
    """LANES rows from `first` on, as (hi, hi, lo) or rounded."""
    rows = f.rows[thread]
    lo = np.int64(PARTS - 1 if f.parts == PARTS else 0)
    width = rounded_up(f.x.shape[2], STEP)
    load_rows(rows, f.x, first, head, f.n_used, width, np.int64(1), lo, f.spare[thread])
    return rows, width


@task_code(TilePacking)
def pairs_task(f, task, thread):
    head, first, seen = _is_seen(f, task)
    if seen:
        for t in range(first, first + BC, LANES):
            rows, width = _load(f, thread, head, t)
            for i in range(0, LANES, 2):
                put_pairs(f.packed[head], t + i, rows[i], rows[i + 1], width)


@task_code(TilePacking)
def transposed_task(f, task, thread):
    head, first, seen = _is_seen(f, task)
    if seen:
        panels = f.packed[head]
        for t in range(first, first + BC, LANES):
            rows, width = _load(f, thread, head, t)
            transpose_tile(panels[t // SIDE], rows, t % SIDE, f.parts * width)


# -- forward --------------------------------------------------------------------------------------


class ForwardTiles(Frame):
    """Arrays of a forward pass, and each thread's tile."""

    o: Floats3
    lse: Floats2
    q: Floats3
    k_transposed: Shorts3
    v_pairs: Shorts3
    span: Ints2
    scale: Float
    starts: Ints2
    stops: Ints2
    q_rows: Shorts3
    s: Floats3
    p: Shorts3
    o_tile: Floats3
    m: Floats2
    norm: Floats2
    spare: Floats2


@kernel
def _in_turn(task, n_tiles):
    """A task's head and tile. Few and many keys alternate, so neighbours take equally long."""
    turn = task % n_tiles
    return task // n_tiles, (turn // 2 if turn % 2 == 0 else n_tiles - 1 - turn // 2)


@task_code(ForwardTiles)
def _forward_task(f, task, thread):
    """One tile's queries of one head."""
    q, span = f.q, f.span
    head, tile = _in_turn(task, (q.shape[0] + BR - 1) // BR)
    first, key_head = tile * BR, head // (q.shape[1] // f.k_transposed.shape[0])
    n = min(BR, q.shape[0] - first)
    n_groups = (n + SIDE - 1) // SIDE
    starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
    rows, s = f.q_rows[thread][: n_groups * SIDE], f.s[thread][: n_groups * SIDE]
    p, o_tile, m, norm = f.p[thread], f.o_tile[thread], f.m[thread], f.norm[thread]
    width = o_tile.shape[1]
    load_rows(rows, q, first, head, q.shape[0], width, np.int64(2), np.int64(1), f.spare[thread])
    for i in range(n_groups * SIDE):
        fill(o_tile[i], ZERO)
    fill(m, MASKED)
    fill(norm, ZERO)
    start, stop = group_ranges(starts, stops, span, first, SIDE)
    configure()
    for key in range(start // BC * BC, stop, BC):
        block = ScoreBlock(span, first, key, key_window(start, stop, key))
        scores(s, rows, f.k_transposed[key_head], key, PARTS * width // STEP, starts, stops)
        softmax_rows(p, s, o_tile, m, norm, block, f.scale)
        add_to_queries(o_tile, p, f.v_pairs[key_head], key, starts, stops)
    release()
    divide_tile(f.o, f.lse, o_tile, m, norm, head, first, n)


# -- the paths ------------------------------------------------------------------------------------


def common_arrays(problem: AttentionProblem, parts: int) -> dict[str, Array]:
    """What both passes need of each thread, and Kᵀ; `parts` of each number make the scores."""
    width = panel_width(problem.head_size)
    return {
        "k_transposed": transposed_array(
            problem.n_key_heads, problem.n_keys, problem.head_size, parts
        ),
        "starts": per_thread(N_GROUPS, dtype=np.int32),
        "stops": per_thread(N_GROUPS, dtype=np.int32),
        "q_rows": per_thread(BR, parts * width + PAD, dtype=np.uint16),
        "s": per_thread(BR, LDS),
        "spare": per_thread(width),
        "key_rows": per_thread(LANES, parts * width + PAD, dtype=np.uint16),
    }


def _forward_layout(problem: AttentionProblem) -> Layout:
    return Layout(
        **common_arrays(problem, PARTS),
        v_pairs=pairs_array(problem.n_key_heads, problem.n_keys, problem.head_size),
        p=per_thread(BR, LDP, dtype=np.uint16),
        o_tile=per_thread(BR, panel_width(problem.head_size)),
        m=per_thread(BR),
        norm=per_thread(BR),
    )


def takes(problem: AttentionProblem) -> bool:
    """Tiles pay off when they are full. Values are as long as keys."""
    rounds = problem.compute != "f32" and not problem.has_extras
    fits = problem.reads_floats and problem.value_size == problem.head_size
    return rounds and fits and problem.n_queries >= SIDE


def pack(code: Code, x: np.ndarray, packed: np.ndarray, parts: int, memory: Scratch) -> TaskStage:
    """A stage that packs x."""
    n_blocks = -(-len(x) // BC)
    f = TilePacking(
        x=x, packed=packed, n_used=len(x), n_blocks=n_blocks, parts=parts,
        rows=memory["key_rows"], spare=memory["spare"],
    )  # fmt: skip
    return stage(code, f, x.shape[1] * n_blocks)


def launch_seen(span: np.ndarray, packing: list[TaskStage], stages: tuple[TaskStage, ...]) -> None:
    """Keys past the last one that any query sees are not packed: a cache is mostly empty."""
    n_used = int(span[:, 1].max())
    for each in packing:
        each.lies.put(n_used=n_used)
    launch(*packing, *stages)


def _forward(problem: AttentionProblem, a: Forward, memory: Scratch) -> Call:
    packing = [
        pack(transposed_task, a.k, memory["k_transposed"], PARTS, memory),
        pack(pairs_task, a.v, memory["v_pairs"], 1, memory),
    ]
    own = {name: memory[name] for name in memory if name in ForwardTiles.fields}
    f = ForwardTiles(o=a.o, lse=a.lse, q=a.q, span=a.span, scale=float(a.scale), **own)
    tiles = stage(_forward_task, f, problem.n_heads * -(-problem.n_queries // BR))
    return Call(launch_seen, a.span, packing, (tiles,))


FORWARD: AttentionPath[Forward] = AttentionPath("amx", True, takes, _forward_layout, _forward)
