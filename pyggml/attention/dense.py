"""Rows of attention scores in blocks: what pyggml.ops.attention_dense runs.

A row is a pair of query and head. ROWS of them are made at a time, over the keys that one of them
sees; the heads that share a key head are rows of one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pyggml import gemm
from pyggml._jit import kernel, parallel, prange
from pyggml._simd import dot, exp32, fill, row_max, tanh32
from pyggml.attention.decode_tile import as_float
from pyggml.attention.tiles import NOTHING
from pyggml.tensor import Shape

ROWS = 192  # at 4096 keys a block of scores is 3 MiB
_ZERO, _ONE = np.float32(0), np.float32(1)
_MINUS_INF = np.float32(-np.inf)

# -- scores of one row --------------------------------------------------------------------------


@kernel
def _cap(row, scale, cap):
    """row = cap·tanh(scale·row / cap), or scale·row."""
    if cap > _ZERO:
        for j in range(row.size):
            row[j] = cap * tanh32(row[j] * (scale / cap))
    else:
        for j in range(row.size):
            row[j] *= scale


@kernel
def _add_bias(row, mask, slope, distance):
    """row += slope·mask; where there is no mask, slope·(distance + j)."""
    if mask.size == row.size:
        for j in range(row.size):
            row[j] += slope * mask[j]
    elif slope > _ZERO:
        for j in range(row.size):
            row[j] += slope * np.float32(distance + j)


@kernel
def _soft_max(row, sink):
    """row = its share of the sum, which the sink is part of; the sum's logarithm."""
    top = sink
    if row.size > 0:
        top = max(top, row_max(row))
    if top == _MINUS_INF:
        for j in range(row.size):
            row[j] = _ZERO
        return NOTHING
    total = _ZERO
    for j in range(row.size):
        row[j] = exp32(row[j] - top)
        total += row[j]
    total += exp32(sink - top)
    share = _ONE / total
    for j in range(row.size):
        row[j] *= share
    return top + np.log(total)


@kernel
def _seen(mask, head, query, start, stop):
    """The mask of one head and query from key `start` on; nothing if there is no mask."""
    return mask[head % mask.shape[0], query % mask.shape[1], start : min(stop, mask.shape[2])]


@parallel
def _rows_forward(p, lse, span, mask, sinks, slopes, scale, cap, first, low, head, repeats):
    """p (n, keys from `low` on), scores, becomes probabilities; row m is query first + m // repeats
    of head + m % repeats."""
    for m in prange(p.shape[0]):
        t, h = first + m // repeats, head + m % repeats
        start, stop = span[t, 0], max(span[t, 0], span[t, 1])
        row = p[m, start - low : stop - low]
        fill(p[m, : start - low], _ZERO)
        fill(p[m, stop - low :], _ZERO)
        _cap(row, scale, cap)
        _add_bias(row, _seen(mask, h, t, start, stop), slopes[h], start - stop + 1)
        lse[h, t] = _soft_max(row, sinks[h])


@kernel
def _row_back(p, ds, lse, delta, mask, slope, scale, cap, distance):
    """p: scores to probabilities; ds: do·v to d(loss)/d(q·k)."""
    for j in range(p.size):
        ds[j] -= delta
    if cap > _ZERO:
        for j in range(p.size):
            u = tanh32(p[j] * (scale / cap))
            ds[j] *= _ONE - u * u
            p[j] = cap * u
    else:
        for j in range(p.size):
            p[j] *= scale
    _add_bias(p, mask, slope, distance)
    for j in range(p.size):
        p[j] = exp32(p[j] - lse)
        ds[j] *= p[j] * scale


@parallel
def _rows_back(
    p, ds, o, do, lse, delta, span, mask, slopes, scale, cap, first, low, head, repeats
):  # fmt: skip
    for m in prange(p.shape[0]):
        t, h = first + m // repeats, head + m % repeats
        start, stop = span[t, 0], max(span[t, 0], span[t, 1])
        delta[h, t] = dot(o[m], do[m])
        for row in (p[m], ds[m]):
            fill(row[: start - low], _ZERO)
            fill(row[stop - low :], _ZERO)
        _row_back(
            p[m, start - low : stop - low], ds[m, start - low : stop - low], lse[h, t],
            delta[h, t], _seen(mask, h, t, start, stop), slopes[h], scale, cap, start - stop + 1,
        )  # fmt: skip


@kernel
def _sinks_back(dsinks, sinks, lse, delta):
    for h in range(dsinks.size):
        total = np.float64(0)
        for t in range(lse.shape[1]):
            total -= exp32(sinks[h] - lse[h, t]) * delta[h, t]
        dsinks[h] = total


@kernel
def _product(q, key):
    total = _ZERO
    for i in range(q.size):
        total += q[i] * as_float(key[i])
    return total


@parallel
def _few_queries(out, lse, p, q, k, v, span, mask, sinks, slopes, scale, cap):
    """One query and head after the other, k and v float32 or halves; p (T, H, S) is scratch."""
    n_heads, d = q.shape[1:]
    repeats = n_heads // k.shape[1]
    for m in prange(q.shape[0] * n_heads):
        t, h = m // n_heads, m % n_heads
        start, stop = span[t, 0], max(span[t, 0], span[t, 1])
        row = p[t, h, start:stop]
        for j in range(row.size):
            row[j] = _product(q[t, h], k[start + j, h // repeats])
        _cap(row, scale, cap)
        _add_bias(row, _seen(mask, h, t, start, stop), slopes[h], start - stop + 1)
        lse[h, t] = _soft_max(row, sinks[h])
        fill(out[t, h], _ZERO)
        for j in range(row.size):
            value = v[start + j, h // repeats]
            for i in range(d):
                out[t, h, i] += row[j] * as_float(value[i])


# -- blocks of rows -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """The sources of one node as the kernels take them: what is absent is empty or changes nothing.

    k and v are float32; `few` also takes them as pyggml.attention.widen.readable gives halves.
    mask is (n, T, S) or (1, 1, 0), sinks (H,) or -inf, slopes (H,) or zeros.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    span: np.ndarray
    mask: np.ndarray
    sinks: np.ndarray
    slopes: np.ndarray
    scale: np.float32
    cap: np.float32

    @property
    def repeats(self) -> int:
        """Query heads to a key head."""
        return int(self.q.shape[1] // self.k.shape[1])


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries first … first + n of the heads of one group, and the keys low … high."""

    group: int
    heads: slice
    queries: slice
    low: int
    high: int

    def rows_of(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """These queries and heads of x (T, H, D) as gapless rows, in the memory of `rows`."""
        part = x[self.queries, self.heads]
        filled = rows[: part.shape[0] * part.shape[1]]
        np.copyto(filled.reshape(part.shape), part)
        return filled

    def scores(self, memory: np.ndarray, n_rows: int) -> np.ndarray:
        """Memory for one number per row and key."""
        width = self.high - self.low
        return memory.reshape(-1)[: n_rows * width].reshape(n_rows, width)


def _blocks(p: Problem) -> Iterator[_Block]:
    step = queries_per_block(p.repeats)
    n_queries, n_keys = p.q.shape[0], p.k.shape[0]
    for group in range(p.k.shape[1]):
        heads = slice(group * p.repeats, (group + 1) * p.repeats)
        for first in range(0, n_queries, step):
            seen = p.span[first : first + step]
            low = min(int(seen[:, 0].min()), n_keys - 1)
            high = max(int(seen[:, 1].max()), low + 1)
            yield _Block(group, heads, slice(first, first + len(seen)), low, high)


def queries_per_block(repeats: int) -> int:
    """So many that their heads make up about ROWS rows."""
    return max(1, ROWS // repeats)


def _multiply(
    c: np.ndarray, a: np.ndarray, b: np.ndarray, work: np.ndarray, accumulate: bool = False
) -> None:
    """c (M, N) (+)= a (M, K) · b (N, K)ᵀ."""
    gemm.strided(c[None], a[None], b[None], work, accumulate)()


def _where(p: Problem, block: _Block) -> tuple[np.float32 | int, ...]:
    """The last arguments of the kernels over rows."""
    first, head = block.queries.start, block.heads.start
    return p.scale, p.cap, first, block.low, head, p.repeats


def forward_shapes(q: Shape, k: Shape) -> list[Shape]:
    """Scratch of `forward`: scores, and rows of q and of the result."""
    n_rows = min(q[0], queries_per_block(q[1] // k[1])) * (q[1] // k[1])
    return [(n_rows, k[0]), (n_rows, q[2]), (n_rows, q[2])]


def forward(
    p: Problem, out: np.ndarray, lse: np.ndarray, work: np.ndarray, scratch: list[np.ndarray]
) -> None:
    """out (T, H, D) and lse (H, T); scratch as forward_shapes says, work for the products."""
    memory, q_memory, o_memory = scratch
    for block in _blocks(p):
        keys = slice(block.low, block.high), block.group
        q = block.rows_of(p.q, q_memory)
        scores, o = block.scores(memory, len(q)), o_memory[: len(q)]
        _multiply(scores, q, p.k[keys], work)
        _rows_forward(scores, lse, p.span, p.mask, p.sinks, p.slopes, *_where(p, block))
        _multiply(o, scores, p.v[keys].T, work)
        part = out[block.queries, block.heads]
        np.copyto(part, o.reshape(part.shape))


def backward_shapes(q: Shape, k: Shape) -> list[Shape]:
    """Scratch of `backward`: scores and their gradients, rows, one key head's sums, δ."""
    scores, rows, _ = forward_shapes(q, k)
    return [scores, scores, rows, rows, rows, rows, (k[0], k[2]), (k[0], k[2]), (q[1], q[0])]


def backward(
    p: Problem,
    grads: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    work: np.ndarray,
    scratch: list[np.ndarray],
) -> None:
    """grads: dq, dk, dv and dsinks; scratch as backward_shapes says."""
    dq, dk, dv, dsinks = grads
    *memory, dk_sum, dv_sum, delta = scratch
    for block in _blocks(p):
        if block.queries.start == 0:
            dk_sum.fill(0)
            dv_sum.fill(0)
        _block_back(p, block, dq, o, lse, do, work, [*memory, dk_sum, dv_sum, delta])
        if block.queries.stop == len(p.q):
            np.copyto(dk[:, block.group], dk_sum)
            np.copyto(dv[:, block.group], dv_sum)
    _sinks_back(dsinks, p.sinks, lse, delta)


def _block_back(
    p: Problem, block: _Block, dq: np.ndarray, o: np.ndarray, lse: np.ndarray, do: np.ndarray,
    work: np.ndarray, scratch: list[np.ndarray],
) -> None:  # fmt: skip
    s_memory, ds_memory, q_rows, o_rows, do_rows, dq_rows, dk_sum, dv_sum, delta = scratch
    keys, seen = slice(block.low, block.high), (slice(block.low, block.high), block.group)
    q_rows, o_rows = block.rows_of(p.q, q_rows), block.rows_of(o, o_rows)
    do_rows, dq_rows = block.rows_of(do, do_rows), dq_rows[: len(q_rows)]
    s, ds = block.scores(s_memory, len(q_rows)), block.scores(ds_memory, len(q_rows))
    _multiply(s, q_rows, p.k[seen], work)
    _multiply(ds, do_rows, p.v[seen], work)
    _rows_back(
        s, ds, o_rows, do_rows, lse, delta, p.span, p.mask, p.slopes, *_where(p, block)
    )  # fmt: skip
    _multiply(dq_rows, ds, p.k[seen].T, work)
    _multiply(dk_sum[keys], ds.T, q_rows.T, work, accumulate=True)
    _multiply(dv_sum[keys], s.T, do_rows.T, work, accumulate=True)
    part = dq[block.queries, block.heads]
    np.copyto(part, dq_rows.reshape(part.shape))


def few(p: Problem, out: np.ndarray, lse: np.ndarray, scores: np.ndarray) -> None:
    """out and lse without products; scores (T, H, S) is scratch."""
    _few_queries(
        out, lse, scores, p.q, p.k, p.v, p.span, p.mask, p.sinks, p.slopes, p.scale, p.cap
    )  # fmt: skip


def work_bytes(q: Shape, k: Shape) -> int:
    """Scratch of any product here."""
    rows, _, _ = forward_shapes(q, k)
    shapes = [(rows[0], k[2]), (rows[0], k[0]), (k[0], rows[0])]
    return max(gemm.work_bytes(*s) for s in shapes)
