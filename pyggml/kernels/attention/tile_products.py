"""The products of a tile of attention, whatever the tiles are.

scores           S = Q·Kᵀ                    dP = dO·Vᵀ
add_to_queries   O += P·V                    dQ += dS·K
add_to_keys      dV += Pᵀ·dO                 dK += dSᵀ·Q

f is a frame of pyggml.kernels.attention.tiles; groups of queries, starts and stops are as in
pyggml.kernels.attention.softmax.
"""

from pyggml.jit import kernel
from pyggml.kernels.attention.softmax import BC, groups_that_see
from pyggml.kernels.gemm.panels import rounded_up


@kernel
def scores(f, s, rows, packed, key, starts, stops):
    """s = rows · packed, from key `key` on, in the panels that a group sees any key of."""
    tile, lds, ld = f.sizes(), s.shape[1], rows.shape[1]
    for j in range(0, BC, tile.panel):
        b = packed[(key + j) // tile.panel].ctypes.data
        for g in range(starts.shape[0]):
            if starts[g] < key + j + tile.panel and stops[g] > key + j:
                a = rows.ctypes.data + g * tile.group * ld * 4
                c = s.ctypes.data + (g * tile.group * lds + j) * 4
                f.multiply(a, ld, 1, b, c, lds, ld - tile.pad, False)


@kernel
def add_to_queries(f, total, weights, packed, key, starts, stops):
    """total (queries, width) += weights · packed, from the keys `key` … `key + BC`; weights:
    words."""
    tile, ldc, lda = f.sizes(), total.shape[1], weights.shape[1]
    for p in range(packed.shape[0]):
        for g in range(starts.shape[0]):
            start = max(starts[g] - key, 0) // tile.step * tile.step
            stop = rounded_up(min(stops[g] - key, BC), tile.step)
            if start < stop:
                a = weights.ctypes.data + (g * tile.group * lda + start // tile.per_word) * 4
                b = packed[p].ctypes.data + (key + start) // tile.per_word * tile.panel * 4
                c = total.ctypes.data + (g * tile.group * ldc + p * tile.panel) * 4
                f.multiply(a, lda, 1, b, c, ldc, (stop - start) // tile.per_word, True)


@kernel
def add_to_keys(f, total, weights, row, step, packed, block, starts, stops):
    """total[key + window] (keys, width) += weightsᵀ · packed, which holds the tile's queries; row,
    step: words of the weights from key to key, and along the queries."""
    tile, ldc, key = f.sizes(), total.shape[1], block.key
    of_group = tile.group // tile.per_word  # words
    for p in range(packed.shape[0]):
        for j in range(block.window[0], block.window[1], tile.group):
            start, stop = groups_that_see(starts, stops, key + j, key + j + tile.group)
            if start < stop:
                first, n = start * of_group, (stop - start) * of_group
                a = weights.ctypes.data + (j * row + first * step) * 4
                b = packed[p].ctypes.data + first * tile.panel * 4
                c = total.ctypes.data + ((key + j) * ldc + p * tile.panel) * 4
                f.multiply(a, row, step, b, c, ldc, n, True)
