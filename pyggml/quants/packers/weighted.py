"""Packing by importance: as ggml's packers with `quant_weights`, whose fits are weighted sums.

In the fit of a block, a weight x_j in a column of importance c_j counts c_j·√(σ² + x_j²). In types
with blocks of 32, σ² is the mean of x² over the row. In the others it is that over the block, and
twice that but for Q2_K, IQ2_XXS and IQ2_XS. In Q6_K a weight counts c_j. The scales of sub-blocks
of K-quants are then fitted likewise: each counts as much as the weights below it. Types that are
not here ignore importance, as in ggml.

The packers of Q4_0 to Q5_1 stand here, since without importance they fit nothing; others stand with
their types.

Source: ggml, src/ggml-quants.c (`quantize_row_*_impl`).
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from pyggml.jit import exact
from pyggml.quants.bits import put_f16
from pyggml.quants.packers.fits import fit_from, fit_levels, weights_of
from pyggml.quants.packers.grid_signed import (
    pack_iq2_s,
    pack_iq2_xs,
    pack_iq2_xxs,
    pack_iq3_s,
    pack_iq3_xxs,
)
from pyggml.quants.packers.grid_ternary import pack_iq1_m, pack_iq1_s
from pyggml.quants.types.iq4 import pack_iq4
from pyggml.quants.types.kquants_min import pack_q2_k, pack_q4_k, pack_q5_k
from pyggml.quants.types.kquants_sym import pack_q3_k, pack_q6_k

# pack(dst, src, importance, means): src and importance float32 (n_blocks, block), means float32
# (n_blocks,), the mean of x² over each block's row → dst uint8 (n_blocks, block_bytes).
PackWeighted = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


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


WEIGHTED: dict[str, PackWeighted] = {
    "Q4_0": partial(_pack_32, choose=_choose_levels, most=8, at=2),
    "Q5_0": partial(_pack_32, choose=_choose_levels, most=16, at=2),
    "Q4_1": partial(_pack_32, choose=_choose_from, most=15, at=4),
    "Q5_1": partial(_pack_32, choose=_choose_from, most=31, at=4),
    "Q2_K": pack_q2_k,
    "Q3_K": pack_q3_k,
    "Q4_K": pack_q4_k,
    "Q5_K": pack_q5_k,
    "Q6_K": pack_q6_k,
    "IQ4_NL": pack_iq4,
    "IQ4_XS": pack_iq4,
    "IQ3_S": pack_iq3_s,
    "IQ3_XXS": pack_iq3_xxs,
    "IQ2_S": pack_iq2_s,
    "IQ2_XS": pack_iq2_xs,
    "IQ2_XXS": pack_iq2_xxs,
    "IQ1_M": pack_iq1_m,
    "IQ1_S": pack_iq1_s,
}
