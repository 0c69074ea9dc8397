"""Attention in tiles, never storing the (n_queries, n_keys) matrix (Dao et al. 2022, 2023).

s_ij = scale · q_i·k_j for span_i0 <= j < span_i1, else −∞
p_ij = exp(s_ij − lse_i),  lse_i = log Σ_j exp(s_ij),  o_i = Σ_j p_ij v_j

With δ_i = do_i·o_i and ds_ij = p_ij (do_i·v_j − δ_i):
dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,   dv_j = Σ_i p_ij do_i

q, o, do, dq are (T, H, D), k, v, dk, dv (S, HK, D), lse and δ (H, T). Head h uses key head
h // (H / HK). A task owns MR rows of its result, so no two threads add to the same number.
Before the tiles, the side the microkernel reads in vectors is copied, padded with zeros: as rows
(n, Dp), and as columns in panels (n / PANEL, D · PANEL); n is a multiple of BLOCK, Dp of PANEL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggml._jit import kernel, task_code
from pyggml._simd import exp32
from pyggml._tasks import (
    SLOT,
    Stage,
    floats2,
    floats3,
    frame,
    integer,
    ints2,
    launch,
    real,
    stage,
)
from pyggml.gemm.panels import LANES, MR, PADDED_MR, PANEL, fill, tile_product, transpose
from pyggml.tensor import Call

BLOCK = 64  # keys (or queries) that one step of the inner loop takes; a multiple of every panel
MASKED = np.float32(-1e30)
ZERO = np.float32(0)


def padded(n: int, to: int) -> int:
    """n rounded up to a multiple of `to`."""
    return -(-n // to) * to


def side_shapes(n_heads: int, n: int, d: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of the padded copies of an (n, n_heads, d) array: by rows and by columns."""
    long = padded(n, BLOCK)
    return (n_heads, long, padded(d, PANEL)), (n_heads, long // PANEL, d * PANEL)


def scratch_floats(d: int) -> int:
    """Floats one thread needs: two packed groups, three tiles, two sums, two rows."""
    return MR * (2 * d + 2 * padded(d, PANEL) + 2) + 3 * (PADDED_MR * BLOCK + LANES)


@kernel
def _pack_head(rows, columns, x, head, used):
    """The first `used` rows of one head of x (T, H, D), and zeros up to the next whole block."""
    d = x.shape[2]
    end = -(-used // BLOCK) * BLOCK
    for t in range(used):
        for i in range(d):
            rows[t, i] = x[t, head, i]
        fill(rows[t, d:], ZERO)
    for t in range(used, end):
        fill(rows[t], ZERO)
    for t in range(end):
        panel, lane = columns[t // PANEL], t % PANEL
        for i in range(d):
            panel[i * PANEL + lane] = x[t, head, i] if t < used else ZERO


@kernel
def _pack_group(packed, x, first, head):
    """Rows first … first + MR of one head as (D, MR); rows past the end are zero."""
    n_rows, _, d = x.shape
    for i in range(MR):
        if first + i < n_rows:
            row = x[first + i, head]
            for j in range(d):
                packed[j * MR + i] = row[j]
        else:
            for j in range(d):
                packed[j * MR + i] = 0


@kernel
def _products(tile, packed, columns, first):
    """tile (MR, BLOCK) = packed rows · columns first … first + BLOCK."""
    d = columns.shape[1] // PANEL
    for j in range(0, BLOCK, PANEL):
        b = columns[(first + j) // PANEL].ctypes.data
        tile_product(packed.ctypes.data, b, PANEL, tile.ctypes.data + j * 4, BLOCK, d, 0)


@kernel
def _add_weighted(total, weights, tile, rows, first):
    """total (MR, Dp) += tile (MR, BLOCK) · rows[first : first + BLOCK]; weights is (BLOCK, MR).

    A store of a whole vector runs over into the next row, which the next store puts right.
    """
    for j in range(0, BLOCK, LANES):
        for i in range(PADDED_MR - LANES, -1, -LANES):
            to = weights.ctypes.data + (j * MR + i) * 4
            transpose(to, MR, tile.ctypes.data + (i * BLOCK + j) * 4, BLOCK)
    wide = rows.shape[1]
    for j in range(0, wide, PANEL):
        b = rows.ctypes.data + (first * wide + j) * 4
        c = total.ctypes.data + j * 4
        tile_product(weights.ctypes.data, b, wide, c, wide, BLOCK, 1)


@kernel
def _write_group(out, total, first, head, factors):
    """out[first + i, head] = total[i] · factors[i]."""
    n_rows, _, d = out.shape
    wide = total.shape[0] // MR
    for i in range(min(MR, n_rows - first)):
        for j in range(d):
            out[first + i, head, j] = total[i * wide + j] * factors[i]


@kernel
def _dot(a, b):
    total = ZERO
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@kernel
def _hull(span, first, n):
    """The smallest range that holds the ranges of n queries."""
    low, high = span[first, 0], span[first, 1]
    for i in range(first + 1, first + n):
        low, high = min(low, span[i, 0]), max(high, span[i, 1])
    return low, high


# -- forward ------------------------------------------------------------------------------------


@kernel
def _online_softmax_row(row, start, stop, scale, total, top, norm):
    """row = exp(scale·row − new top) inside [start, stop), else 0; total and norm are rescaled."""
    best = MASKED
    for j in range(start, stop):
        best = max(best, row[j] * scale)
    new = max(top, best)
    factor = exp32(top - new)
    for j in range(total.shape[0]):
        total[j] *= factor
    added = ZERO
    for j in range(BLOCK):
        p = exp32(row[j] * scale - new) if start <= j < stop else ZERO
        row[j] = p
        added += p
    return new, norm * factor + added


@kernel
def _forward_group(out, lse, q, span, scale, head, first, k_columns, v_rows, mine):
    n_queries, _, d = q.shape
    n = min(MR, n_queries - first)
    wide = v_rows.shape[1]
    size = PADDED_MR * BLOCK + LANES
    packed, tile, weights = mine[: MR * d], mine[MR * d :][:size], mine[MR * d + size :][:size]
    rest = mine[MR * d + 2 * size :]
    total, tops, norms = rest[: MR * wide], rest[MR * wide :][:MR], rest[MR * wide + MR :][:MR]
    _pack_group(packed, q, first, head)
    fill(total, ZERO)
    fill(tops, MASKED)
    fill(norms, ZERO)
    low, high = _hull(span, first, n)
    for block in range(low // BLOCK * BLOCK, high, BLOCK):
        _products(tile, packed, k_columns, block)
        for i in range(n):
            start, stop = max(span[first + i, 0] - block, 0), min(span[first + i, 1] - block, BLOCK)
            row = tile[i * BLOCK : (i + 1) * BLOCK]
            if start < stop:
                sums = total[i * wide : (i + 1) * wide]
                tops[i], norms[i] = _online_softmax_row(
                    row, start, stop, scale, sums, tops[i], norms[i]
                )
            else:
                fill(row, ZERO)
        fill(tile[n * BLOCK :], ZERO)
        _add_weighted(total, weights, tile, v_rows, block)
    for i in range(n):
        lse[head, first + i] = tops[i] + np.log(norms[i]) if norms[i] > 0 else -MASKED
        norms[i] = 1 / norms[i] if norms[i] > 0 else ZERO
    _write_group(out, total, first, head, norms)


def _pack_task(frame, task, thread):
    """The padded copies of one head: argument 0 (T, H, D) to rows, argument 1, and columns, 2."""
    _pack_head(floats3(frame, 1)[task], floats3(frame, 2)[task], floats3(frame, 0), task,
               integer(frame, 3))  # fmt: skip


def _forward_task(frame, task, thread):
    q, k_columns, v_rows = floats3(frame, 2), floats3(frame, 3), floats3(frame, 4)
    n_groups = (q.shape[0] + MR - 1) // MR
    head, group = task // n_groups, task % n_groups
    key_head = head // (q.shape[1] // k_columns.shape[0])
    _forward_group(
        floats3(frame, 0), floats2(frame, 1), q, ints2(frame, 5), real(frame, 6), head, group * MR,
        k_columns[key_head], v_rows[key_head], floats2(frame, 7)[thread],
    )  # fmt: skip


# -- backward -----------------------------------------------------------------------------------


@kernel
def _dq_group(dq, q, do, span, lse, delta, scale, head, first, k_rows, k_columns, v_columns, mine):
    n_queries, _, d = q.shape
    n = min(MR, n_queries - first)
    wide, size = k_rows.shape[1], PADDED_MR * BLOCK + LANES
    q_packed, do_packed, rest = mine[: MR * d], mine[MR * d :][: MR * d], mine[2 * MR * d :]
    s, dp, weights = rest[:size], rest[size:][:size], rest[2 * size :][:size]
    total, factors = rest[3 * size :][: MR * wide], rest[3 * size + MR * wide :][:MR]
    _pack_group(q_packed, q, first, head)
    _pack_group(do_packed, do, first, head)
    fill(total, ZERO)
    fill(factors, scale)
    low, high = _hull(span, first, n)
    for block in range(low // BLOCK * BLOCK, high, BLOCK):
        _products(s, q_packed, k_columns, block)
        _products(dp, do_packed, v_columns, block)
        for i in range(n):
            start, stop = max(span[first + i, 0] - block, 0), min(span[first + i, 1] - block, BLOCK)
            row, other = s[i * BLOCK : (i + 1) * BLOCK], dp[i * BLOCK : (i + 1) * BLOCK]
            log_sum, dot = lse[head, first + i], delta[head, first + i]
            for j in range(BLOCK):
                p = exp32(row[j] * scale - log_sum) if start <= j < stop else ZERO
                row[j] = p * (other[j] - dot)
        fill(s[n * BLOCK :], ZERO)
        _add_weighted(total, weights, s, k_rows, block)
    _write_group(dq, total, first, head, factors)


@kernel
def _dkv_tile(s, dp, low, high, lse, delta, scale, key, n_keys):
    """s becomes p, dp becomes ds, for keys key … (rows); the rest is of the block's queries."""
    n = low.shape[0]
    for i in range(MR):
        row, other = s[i * BLOCK : (i + 1) * BLOCK], dp[i * BLOCK : (i + 1) * BLOCK]
        if i >= n_keys:
            fill(row, ZERO)
            fill(other, ZERO)
            continue
        for j in range(n):
            p = exp32(row[j] * scale - lse[j])
            p = p if low[j] <= key + i < high[j] else ZERO
            row[j] = p
            other[j] = p * (other[j] - delta[j])
        fill(row[n:], ZERO)
        fill(other[n:], ZERO)


@kernel
def _any_sees(low, high, start, stop):
    """Whether any range [low, high) meets the keys [start, stop)."""
    found = False
    for j in range(low.shape[0]):
        found |= low[j] < stop and high[j] > start
    return found


@kernel
def _dkv_group(dk, dv, k, v, ends, lse, delta, scale, key_head, first, q_side, do_side, mine):
    d, n_queries = k.shape[2], ends.shape[1]
    wide, size = q_side[0].shape[2], PADDED_MR * BLOCK + LANES
    repeats = lse.shape[0] // k.shape[1]
    n_keys = min(MR, k.shape[0] - first)
    k_packed, v_packed, rest = mine[: MR * d], mine[MR * d :][: MR * d], mine[2 * MR * d :]
    s, dp, weights = rest[:size], rest[size:][:size], rest[2 * size :][:size]
    sums = rest[3 * size :]
    dk_sum, dv_sum = sums[: MR * wide], sums[MR * wide :][: MR * wide]
    factors = sums[2 * MR * wide :][:MR]
    _pack_group(k_packed, k, first, key_head)
    _pack_group(v_packed, v, first, key_head)
    fill(dk_sum, ZERO)
    fill(dv_sum, ZERO)
    for head in range(key_head * repeats, (key_head + 1) * repeats):
        for block in range(0, n_queries, BLOCK):
            n = min(BLOCK, n_queries - block)
            low, high = ends[0, block : block + n], ends[1, block : block + n]
            if not _any_sees(low, high, first, first + n_keys):
                continue
            _products(s, k_packed, q_side[1][head], block)
            _products(dp, v_packed, do_side[1][head], block)
            log_sums, dots = lse[head, block : block + n], delta[head, block : block + n]
            _dkv_tile(s, dp, low, high, log_sums, dots, scale, first, n_keys)
            _add_weighted(dv_sum, weights, s, do_side[0][head], block)
            _add_weighted(dk_sum, weights, dp, q_side[0][head], block)
    fill(factors, np.float32(1))
    _write_group(dv, dv_sum, first, key_head, factors)
    fill(factors, scale)
    _write_group(dk, dk_sum, first, key_head, factors)


def _delta_task(frame, task, thread):
    """δ of one head, and on the way the ends of the spans as two rows."""
    o, do, delta = floats3(frame, 0), floats3(frame, 1), floats2(frame, 2)
    span, ends = ints2(frame, 3), ints2(frame, 4)
    for t in range(o.shape[0]):
        delta[task, t] = _dot(do[t, task], o[t, task])
        if task == 0:
            ends[0, t], ends[1, t] = span[t, 0], span[t, 1]


def _dq_task(frame, task, thread):
    q, k_rows = floats3(frame, 1), floats3(frame, 7)
    n_groups = (q.shape[0] + MR - 1) // MR
    head, group = task // n_groups, task % n_groups
    key_head = head // (q.shape[1] // k_rows.shape[0])
    _dq_group(
        floats3(frame, 0), q, floats3(frame, 2), ints2(frame, 3), floats2(frame, 4),
        floats2(frame, 5), real(frame, 6), head, group * MR, k_rows[key_head],
        floats3(frame, 8)[key_head], floats3(frame, 9)[key_head], floats2(frame, 10)[thread],
    )  # fmt: skip


def _dkv_task(frame, task, thread):
    k = floats3(frame, 2)
    n_groups = (k.shape[0] + MR - 1) // MR
    _dkv_group(
        floats3(frame, 0), floats3(frame, 1), k, floats3(frame, 3), ints2(frame, 4),
        floats2(frame, 5), floats2(frame, 6), real(frame, 7), task // n_groups,
        task % n_groups * MR, (floats3(frame, 8), floats3(frame, 9)),
        (floats3(frame, 10), floats3(frame, 11)), floats2(frame, 12)[thread],
    )  # fmt: skip


# -- binding ------------------------------------------------------------------------------------

Side = tuple[np.ndarray, np.ndarray]  # rows and columns, shaped as `side_shapes` says

_PACK, _FORWARD, _DELTA = task_code(_pack_task), task_code(_forward_task), task_code(_delta_task)
_DQ, _DKV = task_code(_dq_task), task_code(_dkv_task)


def forward(
    out: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    span: np.ndarray, scale: np.float32, k_side: Side, v_side: Side, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """o and lse; the sides are scratch."""
    packing = [_pack(x, side, 0) for x, side in ((k, k_side), (v, v_side))]
    slots = frame(out, lse, q, k_side[1], v_side[0], span, scale, scratch)
    n_groups = -(-q.shape[0] // MR)
    tiles = stage(_FORWARD, slots, q.shape[1] * n_groups)
    return _launch_seen, (span, packing, (*packing, tiles))


def backward(
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    span: np.ndarray, o: np.ndarray, lse: np.ndarray, do: np.ndarray, scale: np.float32,
    delta: np.ndarray, ends: np.ndarray, sides: Sequence[Side], scratch: np.ndarray,
) -> Call:  # fmt: skip
    """dq, dk and dv; delta (H, T), ends (2, T) int32 and the sides of q, do, k, v are scratch."""
    q_side, do_side, k_side, v_side = sides
    fixed = [_pack(x, side, len(x)) for x, side in ((q, q_side), (do, do_side))]
    packing = [_pack(x, side, 0) for x, side in ((k, k_side), (v, v_side))]
    dots = stage(_DELTA, frame(o, do, delta, span, ends), q.shape[1])
    dq_slots = frame(dq, q, do, span, lse, delta, scale, *k_side, v_side[1], scratch)
    dkv_slots = frame(dk, dv, k, v, ends, lse, delta, scale, *q_side, *do_side, scratch)
    queries = stage(_DQ, dq_slots, q.shape[1] * -(-q.shape[0] // MR))
    keys = stage(_DKV, dkv_slots, k.shape[1] * -(-k.shape[0] // MR))
    return _launch_seen, (span, packing, (*fixed, *packing, dots, queries, keys))


def _pack(x: np.ndarray, side: Side, used: int) -> Stage:
    """The stage that fills a side from the first `used` rows of x (T, H, D)."""
    return stage(_PACK, frame(x, *side, used), x.shape[1])


def _launch_seen(span: np.ndarray, packing: Sequence[Stage], stages: Sequence[Stage]) -> None:
    """Keys past the last one that any query sees need no copy: a cache is mostly empty."""
    used = int(span[:, 1].max())
    for _, _, _, slots in packing:
        slots[3 * SLOT] = used
    launch(*stages)
