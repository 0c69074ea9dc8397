"""Extras of scores: cap, mask, ALiBi and sinks. All code takes one row of scores at a time.

    z   = cap·tanh(scale·q·k / cap) + bias      (without a cap: scale·q·k + bias)
    p_j = e^z_j / (Σ e^z + e^sink),  o = Σ p_j v_j
    ds  = p·(do·v − δ)·(1 − tanh²)·scale,  δ = do·o,  dsink = −Σ e^(sink − lse)·δ

bias is slope·mask; with ALiBi and no mask, slope·(j − the last key that the query sees): a constant
added to all keys does not change a softmax. The sink is a score per head without a value: it enters
the sum alone (gpt-oss, arXiv:2508.10925).
"""

from typing import NamedTuple

import numpy as np

from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.jit import kernel
from pyggml.jit.simd import exp32, row_max
from pyggml.kernels.attention.path import Forward
from pyggml.kernels.attention.softmax import NO_KEYS
from pyggml.kernels.formulas import inline_formula

_ZERO, _ONE = np.float32(0), np.float32(1)
_MINUS_INF = np.float32(-np.inf)
_softcap, _softcap_back = inline_formula(SOFTCAP), inline_formula(SOFTCAP_BACK)


class Extras(NamedTuple):
    """The arrays of pyggml.kernels.attention.path.Forward that a row of scores meets."""

    span: np.ndarray
    mask: np.ndarray
    sinks: np.ndarray
    slopes: np.ndarray
    scale: np.float32
    cap: np.float32


def extras_of(a: Forward) -> Extras:
    return Extras(a.span, a.mask, a.sinks, a.slopes, a.scale, a.cap)


@kernel
def seen_keys(extras, query):
    """The first key that a query sees, and the one past the last."""
    return extras.span[query, 0], max(extras.span[query, 0], extras.span[query, 1])


@kernel
def _mask_row(mask, head, query, start, stop):
    """The mask of one head and query from key `start` on; nothing if there is no mask."""
    return mask[head % mask.shape[0], query % mask.shape[1], start : min(stop, mask.shape[2])]


@kernel
def scores_forward(row, lse, extras, head, query, start, stop):
    """row = the probabilities of keys start … stop from their q·k; writes lse."""
    mask = _mask_row(extras.mask, head, query, start, stop)
    _cap(row, extras.scale, extras.cap)
    _add_bias(row, mask, extras.slopes[head], start - stop + 1)
    lse[head, query] = _softmax(row, extras.sinks[head])


@kernel
def scores_back(p, ds, lse, delta, extras, head, query, start, stop):
    """p: from q·k to probabilities; ds: from do·v to the gradients of q·k."""
    mask = _mask_row(extras.mask, head, query, start, stop)
    _row_back(
        p, ds, lse[head, query], delta[head, query], mask, extras.slopes[head], extras.scale,
        extras.cap, start - stop + 1,
    )  # fmt: skip


@kernel
def _cap(row, scale, cap):
    """row = cap·tanh(scale·row / cap), or scale·row."""
    if cap > _ZERO:
        for j in range(row.size):
            row[j] = _softcap(row[j] * scale, cap)
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
def _softmax(row, sink):
    """row = its share of the sum, which the sink is part of; the sum's logarithm."""
    top = sink
    if row.size > 0:
        top = max(top, row_max(row))
    if top == _MINUS_INF:
        for j in range(row.size):
            row[j] = _ZERO
        return NO_KEYS
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
def _row_back(p, ds, lse, delta, mask, slope, scale, cap, distance):
    """p: scores to probabilities; ds: do·v to d(loss)/d(q·k)."""
    for j in range(p.size):
        ds[j] -= delta
    _cap(p, scale, cap)
    for j in range(p.size if cap > _ZERO else 0):
        ds[j] = _softcap_back(p[j], ds[j], cap)
    _add_bias(p, mask, slope, distance)
    for j in range(p.size):
        p[j] = exp32(p[j] - lse)
        ds[j] *= p[j] * scale
