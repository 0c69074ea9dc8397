"""The path `flash`: attention in tiles (tiled.py), its products by the microkernels.

Two kinds of tiles. `flash` is exact for every compute type: the exponential turns absolute errors
of scores into relative ones. `flash in pairs` rounds the factors of the products to bfloat16, where
the CPU multiplies pairs of them and the problem may round; backward, wherever it rounds.

Training may: its backward pass rounds the same factors, so lse is that of its scores, and its
probabilities add up to 1. With biases of 10 and 30 in the golden Qwen 2's keys the error of
gradients is no larger than with exact scores here (0.073 and 0.34, where it was 0.075 and 0.36), so
the mean key, which such scores share, is not taken off first. Other passes may if the keys of their
model have no bias: then q and k are results of rounded products, and the NMSE of logits grows by a
twentieth (bytes, golden models: 3.3e-4 to 3.6e-4 at most). Of keys with a bias of 30, which is
exact, it would nearly double.
"""

from functools import partial

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.frames import Floats3
from pyggml.jit.scratch import Array, Scratch, per_thread
from pyggml.jit.simd import fill
from pyggml.kernels.attention.pair_softmax import add_lanes, softmax_pairs, softmax_pairs_back
from pyggml.kernels.attention.path import AttentionProblem, Backward, Forward
from pyggml.kernels.attention.row_softmax import SCALES
from pyggml.kernels.attention.softmax import ZERO, ScoreBlock, softmax_tile, softmax_tile_back
from pyggml.kernels.attention.tile_products import add_to_keys, add_to_queries, scores
from pyggml.kernels.attention.tiled import ForwardTiles, Packing, tiled_forward
from pyggml.kernels.attention.tiled_back import BackwardTiles, tiled_backward
from pyggml.kernels.attention.tiles import (
    BR,
    LDP,
    LDS,
    MR,
    PANEL,
    load_rows,
    pack,
    packed_array,
    packed_transposed_array,
    packing,
    panel_width,
    row_words,
    spare_array,
)
from pyggml.kernels.gemm import rounds
from pyggml.kernels.gemm.panels import LANES

_FLOATS, _PAIRS = np.bool_(False), np.bool_(True)
_MR, _LANES = np.int64(MR), np.int64(LANES)


def _fills_tiles(p: AttentionProblem) -> bool:
    """Whether this is float32 attention without extras, of enough queries to fill a group of MR."""
    return not p.has_extras and p.reads_floats and p.n_queries >= MR


@kernel
def _group(block, starts, stops, i):
    """The group of queries at row i of a tile: its scores, which stay in the first cache, and the
    keys that it sees."""
    g = i // MR
    group = ScoreBlock(block.span, block.first + i, block.key, block.window)
    return group, starts[g : g + 1], stops[g : g + 1]


# -- forward --------------------------------------------------------------------------------------


class FloatForward(ForwardTiles):
    QUERIES, GROUP, SCORES = BR, MR, (MR, LDS)
    packed_kt: Floats3  # Kᵀ
    packed_v: Floats3
    q_rows: Floats3  # of each thread (BR, words)

    @kernel
    def load(f, thread, head, first, n_rows):
        rows = f.q_rows[thread][:n_rows]
        load_rows(rows, f.q, first, head, f.q.shape[0], _FLOATS, f.spare[thread])

    @kernel
    def meet(f, thread, key_head, block, starts, stops, o):
        s, kt, v = f.s[thread], f.packed_kt[key_head], f.packed_v[key_head]
        for i in range(0, o.shape[0], MR):
            of, start, stop = _group(block, starts, stops, i)
            own = o[i : i + MR]
            scores(s, f.q_rows[thread][i : i + MR], kt, block.key, start, stop, _FLOATS)
            m, norm = f.m[thread][i : i + MR], f.norm[thread][i : i + MR]
            softmax_tile(s, own, m, norm, of, f.scale)
            add_to_queries(own, s, v, block.key, start, stop, _FLOATS)


class PairForward(FloatForward):
    p: Floats3  # of each thread (MR, LDP)
    norms: Floats3  # (BR, LANES)

    @kernel
    def load(f, thread, head, first, n_rows):
        rows = f.q_rows[thread][:n_rows]
        load_rows(rows, f.q, first, head, f.q.shape[0], _PAIRS, f.spare[thread])

    @kernel
    def begin(f, thread):
        fill(f.norms[thread].reshape(-1), ZERO)

    @kernel
    def end(f, thread):
        add_lanes(f.norm[thread], f.norms[thread])

    @kernel
    def meet(f, thread, key_head, block, starts, stops, o):
        s, kt, v = f.s[thread], f.packed_kt[key_head], f.packed_v[key_head]
        for i in range(0, o.shape[0], MR):
            of, start, stop = _group(block, starts, stops, i)
            own, p = o[i : i + MR], f.p[thread]
            scores(s, f.q_rows[thread][i : i + MR], kt, block.key, start, stop, _PAIRS)
            m, norms = f.m[thread][i : i + MR], f.norms[thread][i : i + MR]
            softmax_pairs(p, s, own, m, norms, of, start, stop, f.scale)
            add_to_queries(own, p, v, block.key, start, stop, _PAIRS)


def _forward_arrays(p: AttentionProblem, pairs: bool) -> dict[str, Array]:
    arrays = {
        "packed_kt": packed_transposed_array(p.n_key_heads, p.n_keys, p.head_size, pairs),
        "packed_v": packed_array(p.n_key_heads, p.n_keys, p.value_size, pairs),
        "q_rows": per_thread(BR, row_words(p.head_size, pairs)),
        "spare": spare_array(max(p.head_size, p.value_size), pairs),
    }
    if pairs:
        arrays |= {"p": per_thread(MR, LDP), "norms": per_thread(BR, LANES)}
    return arrays


def _pack_forward(p: AttentionProblem, a: Forward, scratch: Scratch, pairs: bool) -> list[Packing]:
    how = pairs, a.span, scratch["spare"]
    k, v = (
        packing(a.k, scratch["packed_kt"], True, *how),
        packing(a.v, scratch["packed_v"], False, *how),
    )
    return [k, v]


def _takes_pairs(p: AttentionProblem) -> bool:
    return _fills_tiles(p) and p.may_round and rounds(p.compute) and SCALES


FORWARD = tiled_forward(
    "flash", FloatForward, _fills_tiles, partial(_forward_arrays, pairs=False),
    partial(_pack_forward, pairs=False), panel_width,
)  # fmt: skip
IN_PAIRS = tiled_forward(
    "flash in pairs", PairForward, _takes_pairs, partial(_forward_arrays, pairs=True),
    partial(_pack_forward, pairs=True), panel_width,
)  # fmt: skip

# -- backward -------------------------------------------------------------------------------------


@kernel
def _load(f, thread, head, first, n_rows, pairs):
    """Q and dO of a tile, as first and as second operands."""
    for x, rows, packed in (
        (f.q, f.q_rows[thread], f.packed_q[thread]),
        (f.do, f.do_rows[thread], f.packed_do[thread]),
    ):
        load_rows(rows[:n_rows], x, first, head, x.shape[0], pairs, f.spare[thread])
        pack(packed, x, first, n_rows, head, x.shape[0], pairs, f.spare[thread])


@kernel
def _scores(f, thread, key_head, block, start, stop, i, at, pairs):
    """S and dP of the group at row i of a tile, in the rows from `at` on, with its lse and δ."""
    s, dp, key = f.s[thread][at : at + MR], f.dp[thread][at : at + MR], block.key
    q, do = f.q_rows[thread][i : i + MR], f.do_rows[thread][i : i + MR]
    scores(s, q, f.packed_kt[key_head], key, start, stop, pairs)
    scores(dp, do, f.packed_vt[key_head], key, start, stop, pairs)
    return s, dp, f.log_sums[thread][i : i + MR], f.delta[thread][i : i + MR]


@kernel
def _add_to_keys(f, task, thread, block, p, ds, starts, stops, pairs):
    for i, weights, packed in (
        (2 * task, ds, f.packed_q[thread]), (2 * task + 1, p, f.packed_do[thread])
    ):  # fmt: skip
        add_to_keys(f.sums[i], weights, packed, block.key, block.window, starts, stops, pairs)


class FloatBackward(BackwardTiles):
    QUERIES, GROUP, SCORES = BR, MR, (BR, LDS)
    packed_kt: Floats3  # Kᵀ
    packed_k: Floats3
    packed_vt: Floats3  # Vᵀ
    # of each thread
    q_rows: Floats3  # (BR, words)
    do_rows: Floats3
    packed_q: Floats3  # (panels, words)
    packed_do: Floats3

    @kernel
    def load(f, thread, head, first, n_rows):
        _load(f, thread, head, first, n_rows, _FLOATS)

    @kernel
    def meet(f, task, thread, key_head, block, starts, stops, dq):
        for i in range(0, dq.shape[0], MR):
            of, start, stop = _group(block, starts, stops, i)
            s, dp, lse, delta = _scores(f, thread, key_head, block, start, stop, i, i, _FLOATS)
            softmax_tile_back(s, dp, lse, delta, of, f.scale)
            k = f.packed_k[key_head]
            add_to_queries(dq[i : i + MR], dp, k, block.key, start, stop, _FLOATS)
        _add_to_keys(f, task, thread, block, f.s[thread], f.dp[thread], starts, stops, _FLOATS)


class PairBackward(FloatBackward):
    SCORES = MR, LDS
    p_pairs: Floats3  # (BR / 2, LDS): pairs of queries
    ds_pairs: Floats3
    ds_key_pairs: Floats3  # (MR, LDP): pairs of keys

    @kernel
    def load(f, thread, head, first, n_rows):
        _load(f, thread, head, first, n_rows, _PAIRS)

    @kernel
    def meet(f, task, thread, key_head, block, starts, stops, dq):
        p, ds, ds_rows = f.p_pairs[thread], f.ds_pairs[thread], f.ds_key_pairs[thread]
        for i in range(0, dq.shape[0], MR):
            of, start, stop = _group(block, starts, stops, i)
            s, dp, lse, delta = _scores(f, thread, key_head, block, start, stop, i, 0, _PAIRS)
            softmax_pairs_back(
                ds_rows, p[i // 2 :], ds[i // 2 :], s, dp, lse, delta, of, start, stop, _MR,
                _LANES, f.scale,
            )  # fmt: skip
            k = f.packed_k[key_head]
            add_to_queries(dq[i : i + MR], ds_rows, k, block.key, start, stop, _PAIRS)
        _add_to_keys(f, task, thread, block, p, ds, starts, stops, _PAIRS)


def _backward_arrays(p: AttentionProblem) -> dict[str, Array]:
    d, dv, pairs = p.head_size, p.value_size, rounds(p.compute)
    keys, values = ((p.n_key_heads, p.n_keys, size, pairs) for size in (d, dv))
    depth = (BR // 2 if pairs else BR) * PANEL
    arrays = {
        "packed_kt": packed_transposed_array(*keys),
        "packed_k": packed_array(*keys),
        "packed_vt": packed_transposed_array(*values),
        "q_rows": per_thread(BR, row_words(d, pairs)),
        "do_rows": per_thread(BR, row_words(dv, pairs)),
        "packed_q": per_thread(panel_width(d) // PANEL, depth),
        "packed_do": per_thread(panel_width(dv) // PANEL, depth),
        "spare": spare_array(max(d, dv), pairs),
    }
    if pairs:
        arrays |= dict.fromkeys(("p_pairs", "ds_pairs"), per_thread(BR // 2, LDS))
        arrays["ds_key_pairs"] = per_thread(MR, LDP)
    return arrays


def _pack_backward(p: AttentionProblem, a: Backward, scratch: Scratch) -> list[Packing]:
    how = rounds(p.compute), a.span, scratch["spare"]
    return [
        packing(a.k, scratch["packed_kt"], True, *how),
        packing(a.k, scratch["packed_k"], False, *how),
        packing(a.v, scratch["packed_vt"], True, *how),
    ]


BACKWARD = tiled_backward(
    "flash", lambda p: PairBackward if rounds(p.compute) else FloatBackward, _fills_tiles,
    _backward_arrays, _pack_backward, panel_width,
)  # fmt: skip
