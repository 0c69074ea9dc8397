"""Tiles of attention for the microkernels: their sizes, and how operands are packed.

A tile of scores has BR queries (B_r of Dao et al.) and BC keys, with LDS floats from row to row.
The microkernel broadcasts the words of its first operand, rows that need no packing. The other
operand is packed into panels of PANEL columns (pyggml.kernels.gemm.tile):

    pack              X:  columns are features, the depth counts tokens
    pack_transposed   Xᵀ: columns are tokens, the depth counts features

Both are padded with zeros to whole panels and tiles. With `pairs` a word holds two bfloat16,
neighbours along the depth.
"""

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.frames import Bool, Floats3
from pyggml.jit.scratch import Array, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import task_code
from pyggml.kernels.attention.softmax import BC, ZERO
from pyggml.kernels.attention.tiled import KeyPacking, Packing, rows_to_pack
from pyggml.kernels.gemm.panels import (
    LANES,
    PAIR_NUMBERS,
    round_numbers,
    round_row,
    round_two,
    transpose,
    transpose_rounded,
)
from pyggml.kernels.gemm.tile import ATTENTION_FLOATS, ATTENTION_PAIRS
from pyggml.sizes import round_up

MR, PANEL = ATTENTION_FLOATS.mr, ATTENTION_FLOATS.panel  # of pairs, too
BR = BC // MR * MR  # queries, in whole groups
LDS = round_up(round_up(BC, MR), LANES)  # whole groups of keys
LDP = LDS // 2  # words from row to row of probabilities, pairs of keys

# -- sizes --------------------------------------------------------------------------------------


def panel_width(d: int) -> int:
    """d features, rounded up to whole panels."""
    return round_up(d, PANEL)


def row_words(d: int, pairs: bool) -> int:
    """Words of a row of D numbers, in whole vectors."""
    return ATTENTION_PAIRS.words(d) if pairs else round_up(d, LANES)


def packed_array(n_heads: int, n: int, d: int, pairs: bool) -> Array:
    """X (n, n_heads, d) packed: heads, panels, words of a panel."""
    depth = round_up(n, BC)
    return Array((n_heads, panel_width(d) // PANEL, (depth // 2 if pairs else depth) * PANEL))


def packed_transposed_array(n_heads: int, n: int, d: int, pairs: bool) -> Array:
    """Xᵀ packed: heads, panels, words of a panel."""
    return Array((n_heads, round_up(n, BC) // PANEL, row_words(d, pairs) * PANEL))


def spare_array(d: int, pairs: bool) -> Array:
    """Scratch of each thread for packing."""
    floats = max(LANES * row_words(d, pairs), 2 * panel_width(d)) + PAIR_NUMBERS
    return per_thread(round_up(floats, LANES))


# -- packing ------------------------------------------------------------------------------------


@kernel
def _copy_row(row, x, t, head, n_used):
    """row = one head of x at t, or zeros from `n_used` on; zeros after its D numbers."""
    d = x.shape[2] if t < n_used else 0
    for i in range(d):
        row[i] = x[t, head, i]
    fill(row[d:], ZERO)


@kernel
def load_rows(rows, x, first, head, n_used, pairs, spare):
    """rows (n, words) = rows `first` … of one head of x; zeros from row `n_used` on."""
    done, d = 0, x.shape[2]
    if pairs and d % PAIR_NUMBERS == 0 and first < n_used:
        done, of = min(rows.shape[0], n_used - first), x[first, head].ctypes.data
        for i in range(done):
            round_row(rows.ctypes.data + i * d * 2, of + i * x.shape[1] * d * 4, d)
    for i in range(done, rows.shape[0]):
        if pairs and first + i < n_used:
            round_numbers(rows[i], x[first + i, head], spare)
        else:
            _copy_row(rows[i], x, first + i, head, n_used)


@kernel
def pack(packed, x, first, n, head, n_used, pairs, spare):
    """Rows first … first + n of one head of x, n even; zeros from row `n_used` on."""
    width = packed.shape[0] * PANEL
    one, other = spare[:width], spare[width : 2 * width]
    as_they_lie = pairs and x.shape[2] == width
    for t in range(0, n, 2):
        if as_they_lie and first + t + 1 < n_used:
            a, b = x[first + t, head].ctypes.data, x[first + t + 1, head].ctypes.data
            for p in range(packed.shape[0]):
                to = packed[p, t // 2 * PANEL :].ctypes.data
                round_two(to, a + p * PANEL * 4, b + p * PANEL * 4, PANEL)
            continue
        _copy_row(one, x, first + t, head, n_used)
        _copy_row(other, x, first + t + 1, head, n_used)
        for p in range(packed.shape[0]):
            panel, of = packed[p], p * PANEL
            if pairs:
                to = panel[t // 2 * PANEL :].ctypes.data
                round_two(to, one[of:].ctypes.data, other[of:].ctypes.data, PANEL)
                continue
            for j in range(PANEL):
                panel[t * PANEL + j] = one[of + j]
                panel[(t + 1) * PANEL + j] = other[of + j]


@kernel
def pack_transposed(packed, x, first, head, n_used, pairs, spare):
    """BC rows of one head of x from `first` on, in whole panels; zeros from row `n_used` on."""
    n_words = packed.shape[1] // PANEL
    rows, d = spare[: LANES * n_words].reshape(LANES, n_words), x.shape[2]
    for t in range(first, first + BC, LANES):
        to = packed[t // PANEL].ctypes.data + t % PANEL * 4
        if pairs and d == 2 * n_words and t + LANES <= n_used:
            of = x[t, head].ctypes.data
            for j in range(0, n_words, LANES):
                transpose_rounded(to + j * PANEL * 4, PANEL, of + j * 8, x.shape[1] * d)
            continue
        load_rows(rows, x, t, head, n_used, pairs, spare[LANES * n_words :])
        for j in range(0, n_words, LANES):
            transpose(to + j * PANEL * 4, PANEL, rows.ctypes.data + j * 4, n_words)


class HeadPacking(KeyPacking):
    packed: Floats3
    pairs: Bool


@task_code(HeadPacking)
def _pack_task(f, task, thread):
    head, first, n_used = rows_to_pack(f, task)
    if first < n_used:
        packed = f.packed[head][:, first // (2 if f.pairs else 1) * PANEL :]
        pack(packed, f.x, first, BC, head, n_used, f.pairs, f.spare[thread])


@task_code(HeadPacking)
def _pack_transposed_task(f, task, thread):
    head, first, n_used = rows_to_pack(f, task)
    if first < n_used:
        pack_transposed(f.packed[head], f.x, first, head, n_used, f.pairs, f.spare[thread])


def packing(
    x: np.ndarray,
    packed: np.ndarray,
    transposed: bool,
    pairs: bool,
    span: np.ndarray,
    spare: np.ndarray,
) -> Packing:
    """What packs x, or xᵀ."""
    f = HeadPacking(x=x, packed=packed, span=span, pairs=pairs, spare=spare)
    return (_pack_transposed_task if transposed else _pack_task), f
