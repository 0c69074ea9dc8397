"""The path `flash`: attention in tiles, its products by the microkernels.

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

from typing import ClassVar

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.frames import Floats3
from pyggml.jit.simd import fill
from pyggml.kernels.attention.flash_tile import BR, FLOATS, MR, PAIRS, FloatTiles, PairTiles
from pyggml.kernels.attention.pair_softmax import add_lanes, softmax_pairs
from pyggml.kernels.attention.path import AttentionProblem
from pyggml.kernels.attention.row_softmax import SCALES
from pyggml.kernels.attention.softmax import ZERO, softmax_tile, softmax_tile_back
from pyggml.kernels.attention.tiled import ForwardTiles, tiled_forward
from pyggml.kernels.attention.tiled_back import (
    BackwardTiles,
    PairGradients,
    own_of_pairs,
    tiled_backward,
)
from pyggml.kernels.gemm import rounds
from pyggml.kernels.gemm.panels import LANES

_ONE, _LDS = np.int64(1), np.int64(FLOATS.lds)


def _fills_tiles(p: AttentionProblem) -> bool:
    """Whether this is float32 attention without extras, of enough queries to fill a group of MR."""
    return not p.has_extras and p.reads_floats and p.n_queries >= MR


# -- forward --------------------------------------------------------------------------------------


class FloatForward(FloatTiles, ForwardTiles):
    @kernel
    def softmax(f, thread, i, s, o, m, block, starts, stops):
        softmax_tile(s, o, m, f.norm[thread][i:], block, f.scale)
        return s


class PairForward(PairTiles, ForwardTiles):
    OWN: ClassVar = {"p": (MR, PAIRS.ldp), "norms": (BR, LANES)}
    p: Floats3
    norms: Floats3

    @kernel
    def begin(f, thread):
        fill(f.norms[thread].reshape(-1), ZERO)

    @kernel
    def end(f, thread):
        add_lanes(f.norm[thread], f.norms[thread])

    @kernel
    def softmax(f, thread, i, s, o, m, block, starts, stops):
        p, norms = f.p[thread], f.norms[thread][i : i + MR]
        softmax_pairs(p, s, o, m, norms, block, starts, stops, f.scale)
        return p


def _takes_pairs(p: AttentionProblem) -> bool:
    return _fills_tiles(p) and p.may_round and rounds(p.compute) and SCALES


FORWARD = tiled_forward("flash", FloatForward, _fills_tiles)
IN_PAIRS = tiled_forward("flash in pairs", PairForward, _takes_pairs)

# -- backward -------------------------------------------------------------------------------------


class FloatBackward(FloatTiles, BackwardTiles):
    OWN = dict.fromkeys(("s", "dp"), (BR, FLOATS.lds))  # P and dS of the whole tile

    @kernel
    def softmax_back(f, thread, i, s, dp, block, starts, stops):
        lse, delta = f.log_sums[thread][i:], f.delta[thread][i:]
        softmax_tile_back(s, dp, lse, delta, block, f.scale)
        return dp

    @kernel
    def key_weights(f, thread, which, window, n_rows):
        return f.s[thread] if which else f.dp[thread], _ONE, _LDS


class PairBackward(PairTiles, PairGradients):
    OWN = own_of_pairs(PAIRS)

    @kernel
    def key_weights(f, thread, which, window, n_rows):
        return f.p_pairs[thread] if which else f.ds_pairs[thread], _ONE, _LDS


BACKWARD = tiled_backward(
    "flash", lambda p: PairBackward if rounds(p.compute) else FloatBackward, _fills_tiles
)
