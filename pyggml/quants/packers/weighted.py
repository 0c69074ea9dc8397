"""Packing by importance: as ggml's packers with `quant_weights`, whose fits are weighted sums.

In the fit of a block, a weight x_j in a column of importance c_j counts c_j·√(σ² + x_j²). In types
with blocks of 32, σ² is the mean of x² over the row. In the others it is that over the block, and
twice that but for Q2_K, IQ2_XXS and IQ2_XS. In Q6_K a weight counts c_j. The scales of sub-blocks
of K-quants are then fitted likewise: each counts as much as the weights below it.

The packers of Q4_0 to Q5_1 stand here, since without importance they fit nothing; those of other
types also pack without. Each type declares its own, or that it has none (Quant.fit).

Source: ggml, src/ggml-quants.c (`quantize_row_*_impl`).
"""

from functools import partial

import numpy as np

from pyggml.jit import exact
from pyggml.quants.bits import put_f16
from pyggml.quants.packers.fits import fit_from, fit_levels, weights_of


@exact
def _choose_levels(q, dst, src, weights, zero):
    """Write d of each block, and its levels q + zero to q, uint8 (n_blocks, 32)."""
    trial = np.empty(32, np.uint8)
    for b in range(src.shape[0]):
        put_f16(dst, b, 0, fit_levels(q[b], src[b], weights[b], trial, zero))


@exact
def _choose_from(q, dst, src, weights, q_max):
    """Write d and m of each block, and its levels to q, uint8 (n_blocks, 32)."""
    trial = np.empty(32, np.uint8)
    for b in range(src.shape[0]):
        trials = (-0.9, 0.05, 36)
        scale, below = fit_from(q[b], src[b], weights[b], trial, q_max, trials, True)
        put_f16(dst, b, 0, scale)
        put_f16(dst, b, 2, -below)


def _pack_32(dst, src, importance, means, *, choose, most, at):
    """Levels up to 15, or to 31 with their fifth bits in front, behind `at` bytes of scales."""
    q = np.empty((len(src), 32), np.uint8)
    choose(q, dst, src, weights_of(src, importance, 1, means), most)
    if dst.shape[1] > at + 16:
        dst[:, at : at + 4] = np.packbits(q >> 4, axis=1, bitorder="little")  # bit j: weight j
        at += 4
    dst[:, at:] = q[:, :16] & 15 | (q[:, 16:] & 15) << 4  # byte j: weights j and j + 16


pack_q4_0 = partial(_pack_32, choose=_choose_levels, most=8, at=2)
pack_q5_0 = partial(_pack_32, choose=_choose_levels, most=16, at=2)
pack_q4_1 = partial(_pack_32, choose=_choose_from, most=15, at=4)
pack_q5_1 = partial(_pack_32, choose=_choose_from, most=31, at=4)
