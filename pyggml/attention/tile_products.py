"""The products of a tile of attention, by the register micro-kernels.

    scores           S = Q·Kᵀ                    dP = dO·Vᵀ
    add_to_queries   O += P·V                    dQ += dS·K
    add_to_keys      dV += Pᵀ·dO                 dK += dSᵀ·Q

Groups of MR queries, starts and stops are those of pyggml.attention.softmax; operands are packed as
pyggml.attention.tiles says. A depth counts slots: numbers, or with `pairs` two numbers each.
"""

from __future__ import annotations

import numpy as np

from pyggml._isa import CHOSEN
from pyggml._jit import kernel
from pyggml.attention.tiles import BC, LDS
from pyggml.gemm.microkernel import make_strided_product
from pyggml.gemm.panels import LANES, MR, PANEL

_float_product = make_strided_product(MR, CHOSEN.nv, LANES, pairs=False)
_pair_product = make_strided_product(MR, CHOSEN.nv, LANES, pairs=True, bf16=CHOSEN.bf16)

# Numba would compile a function anew for each Python constant that it is called with.
_ONE, _LDS, _ADDING, _ANEW = np.int64(1), np.int64(LDS), np.bool_(True), np.bool_(False)


@kernel
def _multiply(a, a_row, a_step, b, c, ldc, depth, pairs, adding):
    """C (MR, PANEL) (+)= A·B; addresses, and A's slots from row to row and along the depth."""
    if pairs:
        _pair_product(a, a_row, a_step, b, PANEL, c, ldc, depth, adding)
    else:
        _float_product(a, a_row, a_step, b, PANEL, c, ldc, depth, adding)


@kernel
def scores(s, rows, packed, key, starts, stops, pairs):
    """s = rows · packed, from key `key` on, in the panels that a group sees any key of."""
    depth = rows.shape[1]
    for j in range(0, BC, PANEL):
        b = packed[(key + j) // PANEL].ctypes.data
        for g in range(starts.shape[0]):
            if starts[g] < key + j + PANEL and stops[g] > key + j:
                a = rows.ctypes.data + g * MR * depth * 4
                c = s.ctypes.data + (g * MR * LDS + j) * 4
                _multiply(a, depth, _ONE, b, c, _LDS, depth, pairs, _ANEW)


@kernel
def add_to_queries(total, weights, packed, key, starts, stops, pairs):
    """total (queries, width) += weights · packed, from the keys `key` … `key + BC`."""
    wide, ld, share = total.shape[1], weights.shape[1], 2 if pairs else 1
    for p in range(packed.shape[0]):
        for g in range(starts.shape[0]):
            start = max(starts[g] - key, 0) // share
            stop = (min(stops[g] - key, BC) + share - 1) // share
            if start < stop:
                a = weights.ctypes.data + (g * MR * ld + start) * 4
                b = packed[p].ctypes.data + (key // share + start) * PANEL * 4
                c = total.ctypes.data + (g * MR * wide + p * PANEL) * 4
                _multiply(a, ld, _ONE, b, c, wide, stop - start, pairs, _ADDING)


@kernel
def add_to_keys(total, weights, packed, key, window, starts, stops, pairs):
    """total[key + window] (keys, width) += weightsᵀ · packed, which holds the tile's queries."""
    wide, share = total.shape[1], 2 if pairs else 1
    for p in range(packed.shape[0]):
        for j in range(window[0], window[1], MR):
            start, stop = _groups_that_see(starts, stops, key + j, key + j + MR)
            if start < stop:
                start, stop = start * MR // share, stop * MR // share
                a = weights.ctypes.data + (start * LDS + j) * 4
                b = packed[p].ctypes.data + start * PANEL * 4
                c = total.ctypes.data + ((key + j) * wide + p * PANEL) * 4
                _multiply(a, _ONE, _LDS, b, c, wide, stop - start, pairs, _ADDING)


@kernel
def _groups_that_see(starts, stops, start, stop):
    """The first group that sees any of the keys [start, stop), and the one past the last."""
    first, last = starts.shape[0], 0
    for g in range(starts.shape[0]):
        if starts[g] < stop and stops[g] > start:
            first, last = min(first, g), g + 1
    return first, last


@kernel
def key_window(low, high, key):
    """The columns of a tile that the keys [low, high) meet, in whole groups."""
    start, stop = max(low - key, 0), min(high - key, BC)
    return start // MR * MR, (stop + MR - 1) // MR * MR
