"""Attention in tiles, never storing the (n_queries, n_keys) matrix (Dao et al. 2022, 2023).

s_ij = scale · q_i·k_j for span_i0 <= j < span_i1, else −∞
p_ij = exp(s_ij − lse_i),  lse_i = log Σ_j exp(s_ij),  o_i = Σ_j p_ij v_j

With δ_i = do_i·o_i and ds_ij = p_ij (do_i·v_j − δ_i):
dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,   dv_j = Σ_i p_ij do_i

q, o, do, dq are (T, H, D), k, v, dk, dv (S, HK, D), lse is (H, T). Head h uses key head
h // (H / HK). First k and v are copied as the products want them. A task of the forward pass then
takes a tile's queries of one head. A task of the backward pass takes one head, or of few heads
every n-th tile of queries, makes p and ds once for all three gradients, and sums dk and dv in
memory of its own, which a last stage adds up: no two threads add to the same number, and no sum
depends on who computes it.

With `pairs` the backward pass rounds the factors of its products to bfloat16. The forward pass is
always exact: in its scores the exponential would make relative errors of absolute ones, and p and v
rounded cost a fifth more error in the logits for a tenth of its time (measured).
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import kernel, task_code
from pyggml._simd import dot, exp32, fill, row_max
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
from pyggml.attention.tiles import (
    BELOW,
    BLOCK,
    EXACT,
    GROUPS,
    NOTHING,
    PITCH,
    QUERIES,
    START,
    TILE,
    ZERO,
    add_to_keys,
    add_to_queries,
    cut,
    deep_slots,
    hulls,
    load_rows,
    pack_columns,
    pack_rows,
    padded,
    round_columns,
    round_rows,
    scores,
    seen,
)
from pyggml.call import Call
from pyggml.gemm.panels import LANES, MR, PAIRED, PANEL
from pyggml.tensor import Shape

MASKED = np.float32(-1e30)
FEWEST_TASKS = 16  # of a backward pass, if there are tiles enough

# -- scratch ------------------------------------------------------------------------------------


def forward_floats(d: int) -> int:
    """Floats one thread needs for the forward pass, or to copy."""
    deep, wide = deep_slots(d, False), padded(d, PANEL)
    return QUERIES * (deep + wide + 2) + TILE + 2 * GROUPS + 2 * wide + PAIRED


def backward_floats(d: int) -> int:
    """Floats one thread needs for the backward pass, or to copy."""
    deep, wide = deep_slots(d, False), padded(d, PANEL)
    tiles = 3 * TILE + QUERIES * BLOCK // 2
    return QUERIES * (2 * deep + 3 * wide + 1) + tiles + 2 * GROUPS + 2 * wide + PAIRED


def sums_shape(q: Shape, k: Shape) -> Shape:
    """Shape of the sums of dk and dv: tasks, both, (S, D) with room around it."""
    n_heads, n_tiles = q[1], -(-q[0] // QUERIES)
    parts = min(n_tiles, -(-FEWEST_TASKS // n_heads))
    return n_heads * parts, 2, (padded(k[0], BLOCK) + MR) * padded(k[2], PANEL)


@kernel
def _cut_groups(memory, n):
    """lows and highs for the groups of n queries, and the rest."""
    n_groups = (n + MR - 1) // MR
    lows, rest = cut(memory, GROUPS)
    highs, rest = cut(rest, GROUPS)
    return lows[:n_groups].view(np.int32), highs[:n_groups].view(np.int32), rest


# -- copies -------------------------------------------------------------------------------------


def _rows_task(frame, task, thread):
    """The copy by rows, argument 1, of one head of argument 0, (T, H, D)."""
    x, used = floats3(frame, 0), integer(frame, 2)
    n = (used + BLOCK - 1) // BLOCK * BLOCK
    pack_rows(
        floats3(frame, 1)[task], x, START, n, task, used, integer(frame, 3) != 0,
        floats2(frame, 4)[thread],
    )  # fmt: skip


def _columns_task(frame, task, thread):
    """The copy by columns."""
    pack_columns(
        floats3(frame, 1)[task], floats3(frame, 0), task, integer(frame, 2),
        integer(frame, 3) != 0, floats2(frame, 4)[thread],
    )  # fmt: skip


# -- forward ------------------------------------------------------------------------------------


@kernel
def _online_softmax_row(row, start, stop, scale, total, top, norm):
    """row = exp(scale·row − new top) inside [start, stop), else 0; total and norm are rescaled."""
    some = row[start // LANES * LANES : (stop + LANES - 1) // LANES * LANES]
    start, stop = start % LANES, start % LANES + stop - start
    for j in range(some.shape[0]):
        some[j] = some[j] * scale if start <= j < stop else MASKED
    new = max(top, row_max(some))
    if new > top:
        factor = exp32(top - new)
        norm *= factor
        for j in range(total.shape[0]):
            total[j] *= factor
    added = ZERO
    for j in range(some.shape[0]):
        some[j] = exp32(some[j] - new)
        added += some[j]
    return new, norm + added


@kernel
def _softmax_tile(tile, span, first, n, block, window, scale, total, tops, norms):
    """The tile's scores become weights, with zeros elsewhere in the window."""
    wide = total.shape[0] // QUERIES
    for i in range((n + MR - 1) // MR * MR):
        row = tile[i * PITCH : (i + 1) * PITCH]
        start, stop = seen(span[first:], i, n, block)
        if start >= stop:
            fill(row[window[0] : window[1]], ZERO)
            continue
        fill(row[window[0] : start], ZERO)
        fill(row[stop : window[1]], ZERO)
        sums = total[i * wide : (i + 1) * wide]
        tops[i], norms[i] = _online_softmax_row(row, start, stop, scale, sums, tops[i], norms[i])


@kernel
def _window(low, high, block):
    """The columns of a tile that the hull [low, high) of keys meets, in whole groups."""
    start, stop = max(low - block, 0), min(high - block, BLOCK)
    return start // MR * MR, (stop + MR - 1) // MR * MR


@kernel
def _forward_tile(out, lse, q, span, scale, head, first, k_columns, v_rows, mine):
    n, deep, d = min(QUERIES, q.shape[0] - first), k_columns.shape[1] // PANEL, q.shape[2]
    wide, whole = v_rows.shape[0] * PANEL, (n + MR - 1) // MR * MR
    lows, highs, mine = _cut_groups(mine, n)
    rows, mine = cut(mine, QUERIES * deep)
    tile, mine = cut(mine, TILE)
    total, mine = cut(mine, QUERIES * wide)
    tops, mine = cut(mine, QUERIES)
    norms, spare = cut(mine, QUERIES)
    load_rows(rows[: whole * deep], q, first, head, q.shape[0], deep, EXACT, spare)
    fill(total[: whole * wide], ZERO)
    fill(tops, MASKED)
    fill(norms, ZERO)
    low, high = hulls(lows, highs, span, first)
    for block in range(low // BLOCK * BLOCK, high, BLOCK):
        scores(tile, rows, k_columns, block, lows, highs, EXACT)
        window = _window(low, high, block)
        _softmax_tile(tile, span, first, n, block, window, scale, total, tops, norms)
        add_to_queries(total, tile, BELOW, v_rows, block, lows, highs, EXACT)
    for i in range(n):
        seeing = norms[i] > 0
        lse[head, first + i] = tops[i] + np.log(norms[i]) if seeing else NOTHING
        factor = 1 / norms[i] if seeing else ZERO
        of, to = total[i * wide : (i + 1) * wide], out[first + i, head]
        for j in range(d):
            to[j] = of[j] * factor


def _forward_task(frame, task, thread):
    """One tile's queries; few keys and many in turn, so that neighbours take equally long."""
    q, k_columns, v_rows = floats3(frame, 2), floats3(frame, 3), floats3(frame, 4)
    n_tiles = (q.shape[0] + QUERIES - 1) // QUERIES
    head, turn = task // n_tiles, task % n_tiles
    i = turn // 2 if turn % 2 == 0 else n_tiles - 1 - turn // 2
    key_head = head // (q.shape[1] // k_columns.shape[0])
    _forward_tile(
        floats3(frame, 0), floats2(frame, 1), q, ints2(frame, 5), real(frame, 6),
        head, i * QUERIES, k_columns[key_head], v_rows[key_head], floats2(frame, 7)[thread],
    )  # fmt: skip


# -- backward -----------------------------------------------------------------------------------


@kernel
def _gradient_tile(s, dp, span, first, n, block, window, scale, lse, delta):
    """s becomes p and dp becomes ds, with zeros elsewhere in the window; lse is one head's."""
    for i in range((n + MR - 1) // MR * MR):
        row, other = s[i * PITCH : (i + 1) * PITCH], dp[i * PITCH : (i + 1) * PITCH]
        start, stop = seen(span[first:], i, n, block)
        if start >= stop:
            fill(row[window[0] : window[1]], ZERO)
            fill(other[window[0] : window[1]], ZERO)
            continue
        low, high = start // LANES * LANES, (stop + LANES - 1) // LANES * LANES
        log_sum, mean = lse[first + i], delta[i]
        some, others = row[low:high], other[low:high]
        for j in range(some.shape[0]):
            p = exp32(some[j] * scale - log_sum) if start <= j + low < stop else ZERO
            some[j] = p
            others[j] = p * (others[j] - mean)
        fill(row[window[0] : low], ZERO)
        fill(other[window[0] : low], ZERO)
        fill(row[high : window[1]], ZERO)
        fill(other[high : window[1]], ZERO)


@kernel
def _backward_tile(dq, sums, ins, lse, span, scale, pairs, head, first, sides, mine):
    """dq of a tile's queries; what they add to dk and dv goes to sums (2, keys · wide)."""
    (q, do, o), (k_columns, k_rows, v_columns) = ins, sides
    n, deep = min(QUERIES, q.shape[0] - first), k_columns.shape[1] // PANEL
    n_panels, whole = k_rows.shape[0], (n + MR - 1) // MR * MR
    wide, half = n_panels * PANEL, QUERIES * BLOCK // 2
    lows, highs, mine = _cut_groups(mine, n)
    q_rows, mine = cut(mine, QUERIES * deep)
    do_rows, mine = cut(mine, QUERIES * deep)
    q_side, mine = cut(mine, QUERIES * wide)
    do_side, mine = cut(mine, QUERIES * wide)
    s, mine = cut(mine, TILE)
    dp, mine = cut(mine, TILE)
    rounded, mine = cut(mine, TILE)
    rounded_rows, mine = cut(mine, half)
    total, mine = cut(mine, QUERIES * wide)
    delta, spare = cut(mine, QUERIES)
    load_rows(q_rows[: whole * deep], q, first, head, q.shape[0], deep, pairs, spare)
    load_rows(do_rows[: whole * deep], do, first, head, q.shape[0], deep, pairs, spare)
    q_side, do_side = q_side.reshape(n_panels, -1), do_side.reshape(n_panels, -1)
    pack_rows(q_side, q, first, whole, head, q.shape[0], pairs, spare)
    pack_rows(do_side, do, first, whole, head, q.shape[0], pairs, spare)
    for i in range(n):
        delta[i] = dot(do[first + i, head], o[first + i, head])
    fill(total[: whole * wide], ZERO)
    low, high = hulls(lows, highs, span, first)
    for block in range(low // BLOCK * BLOCK, high, BLOCK):
        window = _window(low, high, block)
        scores(s, q_rows, k_columns, block, lows, highs, pairs)
        scores(dp, do_rows, v_columns, block, lows, highs, pairs)
        _gradient_tile(s, dp, span, first, n, block, window, scale, lse[head], delta)
        p, ds, ds_rows, pitch = s, dp, dp, BELOW
        if pairs:
            (p, ds), ds_rows, pitch = cut(rounded, TILE // 2), rounded_rows, np.int64(BLOCK // 2)
            round_columns(p, s, whole)
            round_columns(ds, dp, whole)
            round_rows(ds_rows, dp, whole)
        add_to_queries(total, ds_rows, pitch, k_rows, block, lows, highs, pairs)
        add_to_keys(sums[0], ds, q_side, block, window, lows, highs, pairs)
        add_to_keys(sums[1], p, do_side, block, window, lows, highs, pairs)
    for i in range(n):
        of, to = total[i * wide : (i + 1) * wide], dq[first + i, head]
        for j in range(to.shape[0]):
            to[j] = of[j] * scale


def _backward_task(frame, task, thread):
    """One head, or every n-th of its tiles, n tasks to a head."""
    q, sums = floats3(frame, 1), floats3(frame, 7)[task]
    ins = q, floats3(frame, 2), floats3(frame, 3)
    k_columns, k_rows, v_columns = floats3(frame, 8), floats3(frame, 9), floats3(frame, 10)
    parts = floats3(frame, 7).shape[0] // q.shape[1]
    head = task // parts
    key_head = head // (q.shape[1] // k_rows.shape[0])
    sides = k_columns[key_head], k_rows[key_head], v_columns[key_head]
    fill(sums[0], ZERO)
    fill(sums[1], ZERO)
    for first in range(task % parts * QUERIES, q.shape[0], parts * QUERIES):
        _backward_tile(
            floats3(frame, 0), sums, ins, floats2(frame, 4), ints2(frame, 11), real(frame, 5),
            integer(frame, 6) != 0, head, first, sides, floats2(frame, 12)[thread],
        )  # fmt: skip


def _keys_task(frame, task, thread):
    """dk and dv, arguments 0 and 1, of some keys: what all tasks that share a key head added."""
    sums, scale = floats3(frame, 2), real(frame, 3)
    n_keys, n_heads, d = floats3(frame, 0).shape
    n_blocks = (n_keys + BLOCK - 1) // BLOCK
    head, first = task // n_blocks, task % n_blocks * BLOCK
    repeats, wide = sums.shape[0] // n_heads, integer(frame, 4)
    for which in range(2):
        factor = scale if which == 0 else np.float32(1)
        for j in range(first, min(first + BLOCK, n_keys)):
            to = floats3(frame, which)[j, head]
            fill(to, ZERO)
            for part in range(head * repeats, (head + 1) * repeats):
                of = sums[part, which][j * wide :]
                for i in range(d):
                    to[i] += of[i] * factor


# -- binding ------------------------------------------------------------------------------------

_ROWS, _COLUMNS = task_code(_rows_task), task_code(_columns_task)
_FORWARD, _BACKWARD, _KEYS = (task_code(t) for t in (_forward_task, _backward_task, _keys_task))


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
    tiles = stage(_FORWARD, slots, q.shape[1] * -(-q.shape[0] // QUERIES))
    return Call(_launch_seen, span, packing, (*packing, tiles))


def backward(
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    span: np.ndarray, o: np.ndarray, lse: np.ndarray, do: np.ndarray, scale: np.float32,
    pairs: bool, k_columns: np.ndarray, k_rows: np.ndarray, v_columns: np.ndarray,
    sums: np.ndarray, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """dq, dk and dv; the copies of k and v and the sums, shaped by sums_shape, are scratch."""
    copies = ((_COLUMNS, k, k_columns), (_ROWS, k, k_rows), (_COLUMNS, v, v_columns))
    packing = [stage(c, frame(x, to, 0, pairs, scratch), x.shape[1]) for c, x, to in copies]
    slots = frame(
        dq, q, do, o, lse, scale, pairs, sums, k_columns, k_rows, v_columns, span, scratch
    )
    heads = stage(_BACKWARD, slots, len(sums))
    wide = padded(k.shape[2], PANEL)
    keys = stage(_KEYS, frame(dk, dv, sums, scale, wide), k.shape[1] * -(-k.shape[0] // BLOCK))
    return Call(_launch_seen, span, packing, (*packing, heads, keys))


def _launch_seen(span: np.ndarray, packing: list[Stage], stages: tuple[Stage, ...]) -> None:
    """Keys past the last one that any query sees need no copy: a cache is mostly empty."""
    used = int(span[:, 1].max())
    for _, _, _, slots in packing:
        slots[2 * SLOT] = used
    launch(*stages)
