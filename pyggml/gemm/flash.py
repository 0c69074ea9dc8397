"""Attention in tiles, never storing the (n_queries, n_keys) matrix (Dao et al. 2022, 2023).

s_ij = scale · q_i·k_j for span_i0 <= j < span_i1, else −∞
p_ij = exp(s_ij − lse_i),  lse_i = log Σ_j exp(s_ij),  o_i = Σ_j p_ij v_j

With δ_i = do_i·o_i and ds_ij = p_ij (do_i·v_j − δ_i):
dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,   dv_j = Σ_i p_ij do_i

q, o, do, dq are (T, H, D), k, v, dk, dv (S, HK, D), lse and δ (H, T). Head h uses key head
h // (H / HK). A task owns MR rows of its result, so no two threads add to the same number. With
`pairs` the backward pass rounds the factors of its products to bfloat16; the forward pass, where
the exponential would make relative errors of absolute ones, is always exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggml._jit import kernel, task_code
from pyggml._simd import dot, exp32, fill
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
from pyggml.gemm.attend import (
    BLOCK,
    TILE,
    ZERO,
    add_weighted,
    cut,
    hull,
    pack_columns,
    pack_group,
    pack_rows,
    products,
    write_group,
)
from pyggml.gemm.panels import LANES, MR, PANEL
from pyggml.tensor import Call

MASKED = np.float32(-1e30)

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
    n, wide, deep = min(MR, q.shape[0] - first), v_rows.shape[1], k_columns.shape[1] // PANEL
    packed, mine = cut(mine, MR * deep + LANES)
    tile, mine = cut(mine, TILE)
    total, mine = cut(mine, MR * wide)
    tops, mine = cut(mine, MR)
    norms, scratch = cut(mine, MR)
    pack_group(packed, q, first, head, deep, False, scratch)
    fill(total, ZERO)
    fill(tops, MASKED)
    fill(norms, ZERO)
    low, high = hull(span, first, n)
    for block in range(low // BLOCK * BLOCK, high, BLOCK):
        products(tile, packed, k_columns, block, False)
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
        add_weighted(total, tile, v_rows, block, False, scratch)
    for i in range(n):
        lse[head, first + i] = tops[i] + np.log(norms[i]) if norms[i] > 0 else -MASKED
        norms[i] = 1 / norms[i] if norms[i] > 0 else ZERO
    write_group(out, total, first, head, norms)


def _rows_task(frame, task, thread):
    """The copy by rows, argument 1, of one head of argument 0, (T, H, D)."""
    pack_rows(
        floats3(frame, 1)[task], floats3(frame, 0), task, integer(frame, 2),
        integer(frame, 3) != 0, floats2(frame, 4)[thread],
    )  # fmt: skip


def _columns_task(frame, task, thread):
    """The copy by columns."""
    pack_columns(
        floats3(frame, 1)[task], floats3(frame, 0), task, integer(frame, 2),
        integer(frame, 3) != 0, floats2(frame, 4)[thread],
    )  # fmt: skip


def _forward_task(frame, task, thread):
    q, k_columns, v_rows = floats3(frame, 2), floats3(frame, 3), floats3(frame, 4)
    n_groups = (q.shape[0] + MR - 1) // MR
    head, group = task // n_groups, task % n_groups
    key_head = head // (q.shape[1] // k_columns.shape[0])
    _forward_group(
        floats3(frame, 0), floats2(frame, 1), q, ints2(frame, 5), real(frame, 6),
        head, group * MR, k_columns[key_head], v_rows[key_head], floats2(frame, 7)[thread],
    )  # fmt: skip


# -- backward -----------------------------------------------------------------------------------


@kernel
def _dq_tile(s, dp, span, first, n, block, lse, delta, scale):
    """s becomes ds for n queries (rows) and the keys of a block; lse and delta are one head's."""
    for i in range(n):
        start, stop = max(span[first + i, 0] - block, 0), min(span[first + i, 1] - block, BLOCK)
        row, other = s[i * BLOCK : (i + 1) * BLOCK], dp[i * BLOCK : (i + 1) * BLOCK]
        log_sum, mean = lse[first + i], delta[first + i]
        for j in range(BLOCK):
            p = exp32(row[j] * scale - log_sum) if start <= j < stop else ZERO
            row[j] = p * (other[j] - mean)
    fill(s[n * BLOCK :], ZERO)


@kernel
def _dq_group(dq, q, do, span, lse, delta, scale, pairs, head, first, k_side, v_columns, mine):
    k_rows, k_columns = k_side
    n, wide, deep = min(MR, q.shape[0] - first), k_rows.shape[1], k_columns.shape[1] // PANEL
    q_packed, mine = cut(mine, MR * deep + LANES)
    do_packed, mine = cut(mine, MR * deep + LANES)
    s, mine = cut(mine, TILE)
    dp, mine = cut(mine, TILE)
    total, mine = cut(mine, MR * wide)
    factors, scratch = cut(mine, MR)
    pack_group(q_packed, q, first, head, deep, pairs, scratch)
    pack_group(do_packed, do, first, head, deep, pairs, scratch)
    fill(total, ZERO)
    fill(factors, scale)
    low, high = hull(span, first, n)
    for block in range(low // BLOCK * BLOCK, high, BLOCK):
        products(s, q_packed, k_columns, block, pairs)
        products(dp, do_packed, v_columns, block, pairs)
        _dq_tile(s, dp, span, first, n, block, lse[head], delta[head], scale)
        add_weighted(total, s, k_rows, block, pairs, scratch)
    write_group(dq, total, first, head, factors)


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
def _dkv_group(
    dk, dv, k, v, ends, lse, delta, scale, pairs, key_head, first, q_side, do_side, mine
):
    n_queries, deep = ends.shape[1], q_side[1].shape[2] // PANEL
    wide, repeats = q_side[0].shape[2], lse.shape[0] // k.shape[1]
    n_keys = min(MR, k.shape[0] - first)
    k_packed, mine = cut(mine, MR * deep + LANES)
    v_packed, mine = cut(mine, MR * deep + LANES)
    s, mine = cut(mine, TILE)
    dp, mine = cut(mine, TILE)
    sums, mine = cut(mine, 2 * MR * wide)
    factors, scratch = cut(mine, MR)
    dk_sum, dv_sum = cut(sums, MR * wide)
    pack_group(k_packed, k, first, key_head, deep, pairs, scratch)
    pack_group(v_packed, v, first, key_head, deep, pairs, scratch)
    fill(sums, ZERO)
    for head in range(key_head * repeats, (key_head + 1) * repeats):
        for block in range(0, n_queries, BLOCK):
            n = min(BLOCK, n_queries - block)
            low, high = ends[0, block : block + n], ends[1, block : block + n]
            if not _any_sees(low, high, first, first + n_keys):
                continue
            products(s, k_packed, q_side[1][head], block, pairs)
            products(dp, v_packed, do_side[1][head], block, pairs)
            log_sums, dots = lse[head, block : block + n], delta[head, block : block + n]
            _dkv_tile(s, dp, low, high, log_sums, dots, scale, first, n_keys)
            add_weighted(dv_sum, s, do_side[0][head], block, pairs, scratch)
            add_weighted(dk_sum, dp, q_side[0][head], block, pairs, scratch)
    fill(factors, np.float32(1))
    write_group(dv, dv_sum, first, key_head, factors)
    fill(factors, scale)
    write_group(dk, dk_sum, first, key_head, factors)


def _delta_task(frame, task, thread):
    """δ of one head, and on the way the ends of the spans as two rows."""
    o, do, delta = floats3(frame, 0), floats3(frame, 1), floats2(frame, 2)
    span, ends = ints2(frame, 3), ints2(frame, 4)
    for t in range(o.shape[0]):
        delta[task, t] = dot(do[t, task], o[t, task])
        if task == 0:
            ends[0, t], ends[1, t] = span[t, 0], span[t, 1]


def _dq_task(frame, task, thread):
    q, k_rows = floats3(frame, 1), floats3(frame, 8)
    n_groups = (q.shape[0] + MR - 1) // MR
    head, group = task // n_groups, task % n_groups
    key_head = head // (q.shape[1] // k_rows.shape[0])
    _dq_group(
        floats3(frame, 0), q, floats3(frame, 2), ints2(frame, 3), floats2(frame, 4),
        floats2(frame, 5), real(frame, 6), integer(frame, 7) != 0, head, group * MR,
        (k_rows[key_head], floats3(frame, 9)[key_head]), floats3(frame, 10)[key_head],
        floats2(frame, 11)[thread],
    )  # fmt: skip


def _dkv_task(frame, task, thread):
    k = floats3(frame, 2)
    n_groups = (k.shape[0] + MR - 1) // MR
    _dkv_group(
        floats3(frame, 0), floats3(frame, 1), k, floats3(frame, 3), ints2(frame, 4),
        floats2(frame, 5), floats2(frame, 6), real(frame, 7), integer(frame, 8) != 0,
        task // n_groups, task % n_groups * MR, (floats3(frame, 9), floats3(frame, 10)),
        (floats3(frame, 11), floats3(frame, 12)), floats2(frame, 13)[thread],
    )  # fmt: skip


# -- binding ------------------------------------------------------------------------------------

Side = tuple[np.ndarray, np.ndarray]  # rows and columns, shaped as pyggml.gemm.attend says

_ROWS, _COLUMNS = task_code(_rows_task), task_code(_columns_task)
_FORWARD, _DELTA = task_code(_forward_task), task_code(_delta_task)
_DQ, _DKV = task_code(_dq_task), task_code(_dkv_task)


def forward(
    out: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    span: np.ndarray, scale: np.float32, k_columns: np.ndarray, v_rows: np.ndarray,
    scratch: np.ndarray,
) -> Call:  # fmt: skip
    """o and lse; the copies of k and v are scratch."""
    packing = [
        stage(_COLUMNS, frame(k, k_columns, 0, False, scratch), k.shape[1]),
        stage(_ROWS, frame(v, v_rows, 0, False, scratch), v.shape[1]),
    ]
    slots = frame(out, lse, q, k_columns, v_rows, span, scale, scratch)
    n_groups = -(-q.shape[0] // MR)
    tiles = stage(_FORWARD, slots, q.shape[1] * n_groups)
    return _launch_seen, (span, packing, (*packing, tiles))


def backward(
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    span: np.ndarray, o: np.ndarray, lse: np.ndarray, do: np.ndarray, scale: np.float32,
    pairs: bool, delta: np.ndarray, ends: np.ndarray, sides: Sequence[Side],
    v_columns: np.ndarray, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """dq, dk and dv; delta (H, T), ends (2, T) int32, sides of q, do and k, and v's are scratch."""
    q_side, do_side, k_side = sides
    fixed = _pack(q, q_side, len(q), pairs, scratch) + _pack(do, do_side, len(q), pairs, scratch)
    seen = _pack(k, k_side, 0, pairs, scratch)
    seen.append(stage(_COLUMNS, frame(v, v_columns, 0, pairs, scratch), v.shape[1]))
    dots = stage(_DELTA, frame(o, do, delta, span, ends), q.shape[1])
    dq_slots = frame(dq, q, do, span, lse, delta, scale, pairs, *k_side, v_columns, scratch)
    dkv_slots = frame(dk, dv, k, v, ends, lse, delta, scale, pairs, *q_side, *do_side, scratch)
    queries = stage(_DQ, dq_slots, q.shape[1] * -(-q.shape[0] // MR))
    keys = stage(_DKV, dkv_slots, k.shape[1] * -(-k.shape[0] // MR))
    return _launch_seen, (span, seen, (*fixed, *seen, dots, queries, keys))


def _pack(x: np.ndarray, side: Side, used: int, pairs: bool, scratch: np.ndarray) -> list[Stage]:
    """The stages that fill a side from the first `used` rows of x (T, H, D)."""
    rows, columns = (frame(x, copy, used, pairs, scratch) for copy in side)
    return [stage(_ROWS, rows, x.shape[1]), stage(_COLUMNS, columns, x.shape[1])]


def _launch_seen(span: np.ndarray, packing: Sequence[Stage], stages: Sequence[Stage]) -> None:
    """Keys past the last one that any query sees need no copy: a cache is mostly empty."""
    used = int(span[:, 1].max())
    for _, _, _, slots in packing:
        slots[2 * SLOT] = used
    launch(*stages)
