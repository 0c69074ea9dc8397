"""The path `amx`: attention in tiles (tiled.py), its products on Intel's tile registers.

Forward, scores are made of split numbers, nearly as exact as float32; the other products round
their factors to bfloat16, as those with weights do. Backward, all factors are rounded, those of the
scores too: training has kept in bfloat16 what q and k are computed from.
"""

import numpy as np

from pyggml.jit import Code, kernel
from pyggml.jit.frames import Floats3, Int, Shorts3
from pyggml.jit.scratch import Array, Scratch, per_thread
from pyggml.jit.tasks import task_code
from pyggml.kernels.attention.amx_tile import (
    BR,
    HI,
    LDP,
    LDS,
    PARTS,
    add_to_keys,
    add_to_queries,
    columns_of,
    load_rows,
    pair_tile,
    pairs_array,
    panel_width,
    scores,
    transpose_tile,
    transposed_array,
)
from pyggml.kernels.attention.pair_softmax import softmax_pairs_back, softmax_rows
from pyggml.kernels.attention.path import AttentionProblem, Backward, Forward
from pyggml.kernels.attention.softmax import BC
from pyggml.kernels.attention.tiled import (
    AttentionTiles,
    ForwardTiles,
    KeyPacking,
    Packing,
    rows_to_pack,
    tiled_forward,
)
from pyggml.kernels.attention.tiled_back import BackwardTiles, tiled_backward
from pyggml.kernels.gemm.amx.rows import LANES, LINE, panel_bytes, put_pairs
from pyggml.kernels.gemm.amx.tiles import SIDE, STEP, configure, release
from pyggml.kernels.gemm.panels import rounded_up

PAD = LINE // 2  # numbers between rows of bfloat16: rows a power of two apart meet in few sets
_SIDE, _STEP = np.int64(SIDE), np.int64(STEP)


def _takes(p: AttentionProblem) -> bool:
    """Tiles pay off when they are full. Values are as long as keys."""
    rounds = p.compute != "f32" and not p.has_extras
    fits = p.reads_floats and p.value_size == p.head_size
    return rounds and fits and p.n_queries >= SIDE


# -- packing keys and values ----------------------------------------------------------------------


class TilePacking(KeyPacking):
    packed: Shorts3
    parts: Int  # of each number
    rows: Shorts3  # of each thread: LANES rows


@kernel
def _load(f, thread, head, first, n_used):
    """LANES rows from `first` on, as (hi, hi, lo) or rounded."""
    rows = f.rows[thread]
    lo = np.int64(PARTS - 1 if f.parts == PARTS else 0)
    width = rounded_up(f.x.shape[2], STEP)
    load_rows(rows, f.x, first, head, n_used, width, np.int64(1), lo, f.spare[thread])
    return rows, width


@task_code(TilePacking)
def _pairs_task(f, task, thread):
    head, first, n_used = rows_to_pack(f, task)
    if first < n_used:
        for t in range(first, first + BC, LANES):
            rows, width = _load(f, thread, head, t, n_used)
            for i in range(0, LANES, 2):
                put_pairs(f.packed[head], t + i, rows[i], rows[i + 1], width)


@task_code(TilePacking)
def _transposed_task(f, task, thread):
    head, first, n_used = rows_to_pack(f, task)
    if first < n_used:
        panels = f.packed[head]
        for t in range(first, first + BC, LANES):
            rows, width = _load(f, thread, head, t, n_used)
            transpose_tile(panels[t // SIDE], rows, t % SIDE, f.parts * width)


def _packing(
    code: Code, x: np.ndarray, packed: np.ndarray, parts: int, a: Forward, scratch: Scratch
) -> Packing:
    rows, spare = scratch["key_rows"], scratch["spare"]
    return code, TilePacking(x=x, packed=packed, span=a.span, parts=parts, rows=rows, spare=spare)


def _arrays(p: AttentionProblem, parts: int) -> dict[str, Array]:
    """What both passes need; `parts` of each number make the scores."""
    width = panel_width(p.head_size)
    return {
        "k_transposed": transposed_array(p.n_key_heads, p.n_keys, p.head_size, parts),
        "q_rows": per_thread(BR, parts * width + PAD, dtype=np.uint16),
        "spare": per_thread(width),
        "key_rows": per_thread(LANES, parts * width + PAD, dtype=np.uint16),
    }


class RegisterTiles(AttentionTiles):
    """What both passes have."""

    QUERIES, GROUP, SCORES = BR, SIDE, (BR, LDS)
    k_transposed: Shorts3
    q_rows: Shorts3  # of each thread

    @kernel
    def begin(f, thread):
        configure()

    @kernel
    def end(f, thread):
        release()


# -- forward --------------------------------------------------------------------------------------


class TileForward(RegisterTiles, ForwardTiles):
    v_pairs: Shorts3
    p: Floats3  # of each thread

    @kernel
    def load(f, thread, head, first, n_rows):
        rows, width = f.q_rows[thread][:n_rows], f.o_tile.shape[2]
        hi, lo = np.int64(2), np.int64(1)
        load_rows(rows, f.q, first, head, f.q.shape[0], width, hi, lo, f.spare[thread])

    @kernel
    def meet(f, thread, key_head, block, starts, stops, o):
        s, p, n_steps = f.s[thread][: o.shape[0]], f.p[thread], PARTS * o.shape[1] // STEP
        scores(s, f.q_rows[thread], f.k_transposed[key_head], block.key, n_steps, starts, stops)
        softmax_rows(p, s, o, f.m[thread], f.norm[thread], block, _SIDE, f.scale)
        add_to_queries(o, p, f.v_pairs[key_head], block.key, starts, stops)


def _forward_arrays(p: AttentionProblem) -> dict[str, Array]:
    v_pairs = pairs_array(p.n_key_heads, p.n_keys, p.head_size)
    return _arrays(p, PARTS) | {"v_pairs": v_pairs, "p": per_thread(BR, LDP)}


def _pack_forward(p: AttentionProblem, a: Forward, scratch: Scratch) -> list[Packing]:
    return [
        _packing(_transposed_task, a.k, scratch["k_transposed"], PARTS, a, scratch),
        _packing(_pairs_task, a.v, scratch["v_pairs"], 1, a, scratch),
    ]


FORWARD = tiled_forward("amx", TileForward, _takes, _forward_arrays, _pack_forward, panel_width)

# -- backward -------------------------------------------------------------------------------------


class TileBackward(RegisterTiles, BackwardTiles):
    k_pairs: Shorts3
    v_transposed: Shorts3
    # of each thread
    do_rows: Shorts3
    q_pairs: Shorts3
    do_pairs: Shorts3
    ds: Floats3
    columns: Shorts3
    p_pairs: Floats3
    ds_pairs: Floats3

    @kernel
    def load(f, thread, head, first, n_rows):
        hi, width = np.int64(HI), f.dq_tile.shape[2]
        for x, rows, pairs in (
            (f.q, f.q_rows[thread][:n_rows], f.q_pairs[thread]),
            (f.do, f.do_rows[thread][:n_rows], f.do_pairs[thread]),
        ):
            load_rows(rows, x, first, head, x.shape[0], width, hi, hi, f.spare[thread])
            pair_tile(pairs, rows, width)

    @kernel
    def meet(f, task, thread, key_head, block, starts, stops, dq):
        key, window, n_steps, n_rows = block.key, block.window, dq.shape[1] // STEP, dq.shape[0]
        s, dp, ds = f.s[thread][:n_rows], f.dp[thread][:n_rows], f.ds[thread]
        p_pairs, ds_pairs, columns = f.p_pairs[thread], f.ds_pairs[thread], f.columns[thread]
        scores(s, f.q_rows[thread], f.k_transposed[key_head], key, n_steps, starts, stops)
        scores(dp, f.do_rows[thread], f.v_transposed[key_head], key, n_steps, starts, stops)
        softmax_pairs_back(
            ds, p_pairs, ds_pairs, s, dp, f.log_sums[thread], f.delta[thread], block, starts,
            stops, _SIDE, _STEP, f.scale,
        )  # fmt: skip
        add_to_queries(dq, ds, f.k_pairs[key_head], key, starts, stops)
        columns_of(columns, ds_pairs, window, n_rows)
        add_to_keys(f.sums[2 * task], columns, f.q_pairs[thread], key, window, starts, stops)
        columns_of(columns, p_pairs, window, n_rows)
        add_to_keys(f.sums[2 * task + 1], columns, f.do_pairs[thread], key, window, starts, stops)


def _backward_arrays(p: AttentionProblem) -> dict[str, Array]:
    heads, keys, d = p.n_key_heads, p.n_keys, p.head_size
    panels = per_thread(panel_width(d) // SIDE, panel_bytes(BR) // 2, dtype=np.uint16)
    return _arrays(p, 1) | {
        "k_pairs": pairs_array(heads, keys, d),
        "v_transposed": transposed_array(heads, keys, d, 1),
        "do_rows": per_thread(BR, panel_width(d) + PAD, dtype=np.uint16),
        "q_pairs": panels,
        "do_pairs": panels,
        "ds": per_thread(BR, LDP),
        "columns": per_thread(BC, BR + PAD, dtype=np.uint16),
        "p_pairs": per_thread(BR // 2, LDS),
        "ds_pairs": per_thread(BR // 2, LDS),
    }


def _pack_backward(p: AttentionProblem, a: Backward, scratch: Scratch) -> list[Packing]:
    return [
        _packing(_transposed_task, a.k, scratch["k_transposed"], 1, a, scratch),
        _packing(_pairs_task, a.k, scratch["k_pairs"], 1, a, scratch),
        _packing(_transposed_task, a.v, scratch["v_transposed"], 1, a, scratch),
    ]


BACKWARD = tiled_backward(
    "amx", lambda p: TileBackward, _takes, _backward_arrays, _pack_backward, panel_width
)
