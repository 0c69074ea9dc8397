"""Tiles of attention for the microkernels: their sizes, and how operands are packed.

A tile of scores has BR queries and BC keys (B_r and B_c of Dao et al.), with LDS floats from row to
row. The microkernel broadcasts the words of its first operand, rows that need no packing. The other
operand is packed into panels of PANEL columns (pyggml.kernels.gemm.tile):

    pack              X:  columns are features, the depth counts tokens
    pack_transposed   Xᵀ: columns are tokens, the depth counts features

Both are padded with zeros to whole panels and tiles. With `pairs` a word holds two bfloat16,
neighbours along the depth.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Bool, Floats2, Floats3, Frame, Int
from pyggml.jit.scratch import Array, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import TaskStage, launch, stage, task_code
from pyggml.kernels.attention.softmax import ZERO
from pyggml.kernels.gemm.panels import (
    LANES,
    PAIR_NUMBERS,
    round_numbers,
    round_row,
    round_two,
    rounded_up,
    transpose,
    transpose_rounded,
)
from pyggml.kernels.gemm.tile import ATTENTION_FLOATS, ATTENTION_PAIRS
from pyggml.sizes import round_up

MR, PANEL = ATTENTION_FLOATS.mr, ATTENTION_FLOATS.panel  # of pairs, too
BC = 128  # keys; a multiple of every panel
BR = BC // MR * MR  # queries, in whole groups
N_GROUPS = BR // MR
LDS = round_up(round_up(BC, MR), LANES)  # whole groups of keys

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
def pack_transposed(packed, x, head, n_used, pairs, spare):
    """The first `n_used` rows of one head of x, and zeros up to the next whole tile."""
    n_words = packed.shape[1] // PANEL
    rows, d = spare[: LANES * n_words].reshape(LANES, n_words), x.shape[2]
    for t in range(0, rounded_up(n_used, BC), LANES):
        to = packed[t // PANEL].ctypes.data + t % PANEL * 4
        if pairs and d == 2 * n_words and t + LANES <= n_used:
            of = x[t, head].ctypes.data
            for j in range(0, n_words, LANES):
                transpose_rounded(to + j * PANEL * 4, PANEL, of + j * 8, x.shape[1] * d)
            continue
        load_rows(rows, x, t, head, n_used, pairs, spare[LANES * n_words :])
        for j in range(0, n_words, LANES):
            transpose(to + j * PANEL * 4, PANEL, rows.ctypes.data + j * 4, n_words)


class HeadPacking(Frame):
    """Packing an operand (n, heads, D); a task takes one head."""

    x: Floats3
    packed: Floats3
    n_used: Int  # rows of x that are read
    pairs: Bool
    spare: Floats2  # a row for each thread


@task_code(HeadPacking)
def _pack_task(f, head, thread):
    n = rounded_up(f.n_used, BC)
    pack(f.packed[head], f.x, np.int64(0), n, head, f.n_used, f.pairs, f.spare[thread])


@task_code(HeadPacking)
def _pack_transposed_task(f, head, thread):
    pack_transposed(f.packed[head], f.x, head, f.n_used, f.pairs, f.spare[thread])


class Packings:
    """The stages that pack keys and values, as far as any query of `span` sees them."""

    def __init__(self, span: np.ndarray, pairs: bool, spare: np.ndarray) -> None:
        self.span, self.pairs, self.spare = span, pairs, spare
        self.frames: list[HeadPacking] = []
        self.stages: list[TaskStage] = []

    def pack(self, x: np.ndarray, packed: np.ndarray) -> None:
        """Add a stage that packs x."""
        self._add(_pack_task, x, packed)

    def pack_transposed(self, x: np.ndarray, packed: np.ndarray) -> None:
        """Add a stage that packs xᵀ."""
        self._add(_pack_transposed_task, x, packed)

    def _add(self, code: Code, x: np.ndarray, packed: np.ndarray) -> None:
        f = HeadPacking(x=x, packed=packed, n_used=len(x), pairs=self.pairs, spare=self.spare)
        self.frames.append(f)
        self.stages.append(stage(code, f, x.shape[1]))

    def then(self, *stages: TaskStage) -> Call:
        """The call that packs and then runs these stages."""
        return Call(_launch_seen, self.span, self.frames, (*self.stages, *stages))


def _launch_seen(
    span: np.ndarray, packings: list[HeadPacking], stages: tuple[TaskStage, ...]
) -> None:
    """Pack keys up to the last that any query sees: the rest of a cache is empty."""
    n_used = int(span[:, 1].max())
    for f in packings:
        f.put(n_used=n_used)
    launch(*stages)
