"""The products of a tile of attention, by the microkernels.

    scores           S = Q·Kᵀ                    dP = dO·Vᵀ
    add_to_queries   O += P·V                    dQ += dS·K
    add_to_keys      dV += Pᵀ·dO                 dK += dSᵀ·Q

Groups of MR queries, starts and stops are as in pyggml.kernels.attention.softmax, packed operands
as in pyggml.kernels.attention.tiles. A depth counts words, which hold one number each, or two with
`pairs`.
"""

import numpy as np

from pyggml.jit import kernel
from pyggml.kernels.attention.softmax import BC, groups_that_see
from pyggml.kernels.attention.tiles import LDS, MR, PANEL
from pyggml.kernels.gemm.microkernel import make_strided_product
from pyggml.kernels.gemm.tile import ATTENTION_FLOATS, ATTENTION_PAIRS

_float_product = make_strided_product(ATTENTION_FLOATS)
_pair_product = make_strided_product(ATTENTION_PAIRS)

# Numba would compile a function anew for each Python constant that it is called with.
_ONE, _LDS, _ADDING, _ANEW = np.int64(1), np.int64(LDS), np.bool_(True), np.bool_(False)


@kernel
def _multiply(a, a_row, a_step, b, c, ldc, depth, pairs, adding):
    """C (MR, PANEL) (+)= A·B; addresses, and A's words from row to row and along the depth."""
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
    ldc, lda, per_word = total.shape[1], weights.shape[1], 2 if pairs else 1
    for p in range(packed.shape[0]):
        for g in range(starts.shape[0]):
            start = max(starts[g] - key, 0) // per_word
            stop = (min(stops[g] - key, BC) + per_word - 1) // per_word
            if start < stop:
                a = weights.ctypes.data + (g * MR * lda + start) * 4
                b = packed[p].ctypes.data + (key // per_word + start) * PANEL * 4
                c = total.ctypes.data + (g * MR * ldc + p * PANEL) * 4
                _multiply(a, lda, _ONE, b, c, ldc, stop - start, pairs, _ADDING)


@kernel
def add_to_keys(total, weights, packed, key, window, starts, stops, pairs):
    """total[key + window] (keys, width) += weightsᵀ · packed, which holds the tile's queries."""
    ldc, per_word = total.shape[1], 2 if pairs else 1
    for p in range(packed.shape[0]):
        for j in range(window[0], window[1], MR):
            start, stop = groups_that_see(starts, stops, key + j, key + j + MR)
            if start < stop:
                start, stop = start * MR // per_word, stop * MR // per_word
                a = weights.ctypes.data + (start * LDS + j) * 4
                b = packed[p].ctypes.data + start * PANEL * 4
                c = total.ctypes.data + ((key + j) * ldc + p * PANEL) * 4
                _multiply(a, _ONE, _LDS, b, c, ldc, stop - start, pairs, _ADDING)
