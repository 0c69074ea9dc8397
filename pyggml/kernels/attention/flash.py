"""The path `flash`: attention in tiles, without the (T, S) matrix (Dao et al. 2022, 2023).

s_ij = scale · q_i·k_j for span_i0 <= j < span_i1, else −∞
p_ij = exp(s_ij − lse_i),  lse_i = log Σ_j exp(s_ij),  o_i = Σ_j p_ij v_j

First K and V are packed. A task then takes a tile's queries of one head, and goes over the tiles of
keys with a running maximum m and a running sum (the paper's ℓ) of each query.

Two paths share this file. `flash` is exact for every compute type: the exponential turns absolute
errors of scores into relative ones. `flash in pairs` rounds the factors of both products to
bfloat16, where the CPU multiplies pairs of them and the problem may round.

Training may: its backward pass rounds the same factors, so lse is that of its scores, and its
probabilities add up to 1. With biases of 10 and 30 in the golden Qwen 2's keys the error of
gradients is no larger than with exact scores here (0.073 and 0.34, where it was 0.075 and 0.36), so
the mean key, which such scores share, is not taken off first. Other passes may if the keys of their
model have no bias: then q and k are results of rounded products, and the NMSE of logits grows by a
twentieth (bytes, golden models: 3.3e-4 to 3.6e-4 at most). Of keys with a bias of 30, which is
exact, it would nearly double.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Ints2
from pyggml.jit.scratch import Layout, Scratch, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import stage, task_code
from pyggml.kernels.attention.pair_softmax import LDP, add_lanes, softmax_pairs
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward
from pyggml.kernels.attention.row_softmax import SCALES
from pyggml.kernels.attention.softmax import MASKED, ZERO, divide_tile, group_ranges, softmax_tile
from pyggml.kernels.attention.tile_products import add_to_queries, key_window, scores
from pyggml.kernels.attention.tiles import (
    BC,
    BR,
    LDS,
    MR,
    N_GROUPS,
    Packings,
    load_rows,
    packed_array,
    packed_transposed_array,
    panel_width,
    row_words,
    spare_array,
)
from pyggml.kernels.gemm import rounds
from pyggml.kernels.gemm.panels import LANES
from pyggml.sizes import round_up


class FlashForward(Frame):
    """A task takes one tile of queries of one head."""

    o: Floats3
    lse: Floats2
    q: Floats3
    span: Ints2
    scale: Float
    packed_kt: Floats3  # Kᵀ
    packed_v: Floats3
    # of each thread
    q_tile: Floats3  # (BR, words)
    s_tile: Floats3  # (MR, LDS), of a group of queries
    p_tile: Floats3  # (MR, LDP)
    o_tile: Floats3  # (BR, width)
    m: Floats2
    norm: Floats2
    norms: Floats3  # (BR, LANES)
    starts: Ints2
    stops: Ints2
    spare: Floats2


@kernel
def _add_group(f, thread, key_head, first, i, key, window, pairs):
    """What a tile of keys adds to the group of queries at row i of a tile: its scores stay in the
    first cache."""
    last, g, first = i + MR, i // MR, first + i
    starts, stops = f.starts[thread][g : g + 1], f.stops[thread][g : g + 1]
    s, o, m = f.s_tile[thread], f.o_tile[thread][i:last], f.m[thread][i:last]
    scores(s, f.q_tile[thread][i:last], f.packed_kt[key_head], key, starts, stops, pairs)
    p = s
    if pairs:
        p, norms = f.p_tile[thread], f.norms[thread][i:last]
        softmax_pairs(p, s, o, m, norms, f.span, first, key, starts, stops, f.scale)
    else:
        norm = f.norm[thread][i:last]
        softmax_tile(s, o, m, norm, f.span, first, key, BC, window, f.scale)
    add_to_queries(o, p, f.packed_v[key_head], key, starts, stops, pairs)


def _forward_code(pairs: bool) -> Code:
    """The task with or without `pairs`; only what a process needs is compiled."""
    rounded = np.bool_(pairs)

    @task_code(FlashForward)
    def forward_task(f, task, thread):
        """A tile of queries of one head. Tiles with few and with many keys alternate, so that
        neighbouring tasks take equally long. It calls no kernel made here: such a one has another
        key in the cache in every process."""
        n_tiles = (f.q.shape[0] + BR - 1) // BR
        head, turn = task // n_tiles, task % n_tiles
        first = (turn // 2 if turn % 2 == 0 else n_tiles - 1 - turn // 2) * BR
        span, key_head = f.span, head // (f.q.shape[1] // f.packed_kt.shape[0])
        n = min(BR, f.q.shape[0] - first)
        n_groups = (n + MR - 1) // MR
        n_rows = n_groups * MR
        q, o = f.q_tile[thread][:n_rows], f.o_tile[thread][:n_rows]
        m, norm, norms = f.m[thread], f.norm[thread], f.norms[thread]
        starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
        load_rows(q, f.q, first, head, f.q.shape[0], rounded, f.spare[thread])
        fill(o.reshape(-1), ZERO)
        fill(m, MASKED)
        fill(norm, ZERO)
        fill(norms.reshape(-1), ZERO)
        start, stop = group_ranges(starts, stops, span, first, MR)
        for key in range(start // BC * BC, stop, BC):
            window = key_window(start, stop, key)
            for i in range(0, n_rows, MR):
                _add_group(f, thread, key_head, first, i, key, window, rounded)
        if rounded:
            add_lanes(norm, norms)
        divide_tile(f.o, f.lse, o, m, norm, head, first, n)

    return forward_task


# -- binding ------------------------------------------------------------------------------------


def fills_tiles(p: AttentionProblem) -> bool:
    """Whether this is float32 attention without extras, of enough queries to fill a group of MR."""
    return not p.has_extras and p.reads_floats and p.n_queries >= MR


def _path(name: str, pairs: bool) -> AttentionPath[Forward]:
    code = _forward_code(pairs)

    def takes(p: AttentionProblem) -> bool:
        in_pairs = p.may_round and rounds(p.compute) and SCALES
        return fills_tiles(p) and (in_pairs or not pairs)

    def layout(p: AttentionProblem) -> Layout:
        return Layout(
            packed_kt=packed_transposed_array(p.n_key_heads, p.n_keys, p.head_size, pairs),
            packed_v=packed_array(p.n_key_heads, p.n_keys, p.value_size, pairs),
            q_tile=per_thread(BR, row_words(p.head_size, pairs)),
            s_tile=per_thread(MR, LDS),
            p_tile=per_thread(MR if pairs else 0, LDP),
            o_tile=per_thread(BR, panel_width(p.value_size)),
            m=per_thread(round_up(BR, LANES)),
            norm=per_thread(round_up(BR, LANES)),
            norms=per_thread(BR if pairs else 0, LANES),
            starts=per_thread(round_up(N_GROUPS, LANES), dtype=np.int32),
            stops=per_thread(round_up(N_GROUPS, LANES), dtype=np.int32),
            spare=spare_array(max(p.head_size, p.value_size), pairs),
        )

    def bind(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
        packings = Packings(a.span, pairs, scratch["spare"])
        packings.pack_transposed(a.k, scratch["packed_kt"])
        packings.pack(a.v, scratch["packed_v"])
        f = FlashForward(o=a.o, lse=a.lse, q=a.q, span=a.span, scale=float(a.scale), **scratch)
        return packings.then(stage(code, f, p.n_heads * -(-p.n_queries // BR)))

    return AttentionPath(name, True, takes, layout, bind)


FORWARD = _path("flash", False)
IN_PAIRS = _path("flash in pairs", True)
