"""Packing that keeps an update: what is written of a change is as much as was meant.

W = W₀ + U, and U is often far below the steps of a coarse type. Rounded to the nearest level, each
weight then falls back to W₀, and nothing of U is left. Here the levels q of a row are those nearest
to W + λU, with the λ at which the error E = q(W + λU) − W has no part along U:

    Σ_j c_j E_j U_j = 0     c_j the importance of column j, 1 without

So what was written, taken along the update, is the update: a few weights make whole steps in its
direction, those first where a step is small and the update large. A row that is too short of
weights for that leaves its rest to the next one. λ is found by bisection: the sum rises with it.

The scales of a block are those that packing W chooses, or, of a tensor that had this type before,
its own, where they are as near to W: blocks without a change keep their bytes.
"""

import numpy as np

from pyggml.errors import QuantError
from pyggml.jit import exact
from pyggml.quants.bits import nearest_int
from pyggml.quants.packers.fits import nearest_level
from pyggml.quants.packers.levels import Levels, levels_of
from pyggml.quants.registry import quant
from pyggml.quants.unpack import UNPACK
from pyggml.quants.whole import quantize, share_blocks

_ROWS = 64  # of which one leaves its rest to the next
# So many times its own Σ c·U² a row takes over from others: a row that hardly changes stays so.
_MOST_OWED = 64.0


@exact
def _level(v, values, is_even):
    """The level whose value is nearest to v."""
    if is_even:
        return nearest_int(min(max(v, values[0]), values[-1]) - values[0])
    return nearest_level(v, values)


@exact
def _round_row(q, offset, step, w, u, c, shift, grid):
    """The levels q nearest to w + shift · u, all (n,); returns Σ c·u·(error against w)."""
    values, is_even = grid
    total = 0.0
    for j in range(w.size):
        if step[j] != 0:
            q[j] = _level((w[j] + shift * u[j] - offset[j]) / step[j], values, is_even)
        error = np.float64(offset[j] + step[j] * values[q[j]]) - np.float64(w[j])
        total += np.float64(c[j]) * np.float64(u[j]) * error
    return total


@exact
def _bracket(q, row, aim, at_rest, grid):
    """Shifts (near, far) with the sum on both sides of the aim, and the sum at each; far is 0 where
    no shift reaches it."""
    offset, step, w, u, c = row
    near, far = np.float32(0), np.float32(1 if at_rest < aim else -1)
    before = at_rest
    while abs(far) < np.float32(1 << 24):
        now = _round_row(q, offset, step, w, u, c, far, grid)
        if (now < aim) != (at_rest < aim):
            return near, far, before, now
        near, before = far, now
        far *= np.float32(4)
    return near, np.float32(0), before, at_rest


@exact
def _keep_row(q, row, owed, grid):
    """Choose the levels of a row, so that its sum is nearest to −owed; returns the sum."""
    offset, step, w, u, c = row
    size = 0.0
    for j in range(w.size):
        size += np.float64(c[j]) * np.float64(u[j]) * np.float64(u[j])
    at_rest = _round_row(q, offset, step, w, u, c, np.float32(0), grid)
    if size == 0:
        return 0.0
    most = _MOST_OWED * size
    aim = -max(-most, min(most, owed))
    near, far, low, high = _bracket(q, row, aim, at_rest, grid)
    if far == 0:
        return _round_row(q, offset, step, w, u, c, near, grid)
    for _ in range(22):  # as far as float32 tells shifts apart
        middle = np.float32(0.5) * (near + far)
        now = _round_row(q, offset, step, w, u, c, middle, grid)
        if (now < aim) == (low < aim):
            near, low = middle, now
        else:
            far, high = middle, now
        if low == high:
            break
    shift = near if abs(low - aim) <= abs(high - aim) else far
    return _round_row(q, offset, step, w, u, c, shift, grid)


@exact
def _keep_rows(q, offset, step, w, u, c, grid):
    """The levels q, uint8 (n_rows, n), of rows w with updates u, both like offset and step float32
    (n_rows, n); c (n_rows, n). Without an update they are the nearest. grid: the
    values of levels, and whether they are even."""
    owed = 0.0
    for i in range(w.shape[0]):
        owed += _keep_row(q[i], (offset[i], step[i], w[i], u[i], c[i]), owed, grid)


def has_levels(name: str) -> bool:
    """Whether `quantize_update` keeps more of an update in this type than `quantize` does."""
    return levels_of(name) is not None


def quantize_update(
    values: np.ndarray,
    before: np.ndarray,
    name: str,
    importance: np.ndarray | None = None,
    own: np.ndarray | None = None,
) -> np.ndarray:
    """`values` packed as type `name`, so that their change against `before` is kept.

    values, before: (..., n) float32; own: what `before` was unpacked from, uint8 (..., row_bytes),
    if it was of this type; importance as in `quantize`. Returns (..., row_bytes) uint8. Types
    without levels, such as F16 and the IQ types below 4 bits, are packed by `quantize`.
    Raises QuantError as `quantize` does, and for arrays of unlike shape.
    """
    if values.shape != before.shape:
        raise QuantError(f"values of shape {values.shape}, but {before.shape} before")
    out = quantize(values, name, importance)
    q, levels = quant(name), levels_of(name)
    if levels is None or not values.size:
        return out
    n, block = values.shape[-1], q.dtype.block
    w, w0 = (np.ascontiguousarray(a, np.float32).reshape(-1, n) for a in (values, before))
    c = np.ones((1, n), np.float32) if importance is None else np.float32(importance).reshape(-1, n)
    blocks = out.reshape(len(w), -1, q.dtype.block_bytes)
    theirs = None if own is None else np.ascontiguousarray(own).reshape(blocks.shape)

    def work(start: int, stop: int) -> None:
        rows = slice(start * _ROWS, min(stop * _ROWS, len(w)))
        each = c[np.arange(rows.start, rows.stop) // (len(w) // len(c))]
        old = None if theirs is None else theirs[rows].reshape(-1, q.dtype.block_bytes)
        new = blocks[rows].reshape(-1, q.dtype.block_bytes)
        _keep_piece(name, levels, new, old, w[rows], w[rows] - w0[rows], each, block)

    share_blocks(-(-len(w) // _ROWS), _ROWS * n, work)
    return out


def _keep_piece(
    name: str,
    levels: Levels,
    new: np.ndarray,
    old: np.ndarray | None,
    w: np.ndarray,
    u: np.ndarray,
    c: np.ndarray,
    block: int,
) -> None:
    """Rows (n_rows, n) of weights with updates, in their blocks `new`, which are written."""
    grid, changed = (levels.values, levels.is_even), u.reshape(-1, block).any(axis=1)
    if old is not None:
        new[:] = _nearer(name, levels, new, old, w.reshape(-1, block), c.reshape(-1, block))
    offset, step = (a.reshape(w.shape) for a in levels.grid(new))
    q = np.zeros(w.shape, np.uint8)
    _keep_rows(q, offset, step, w, u, c, grid)
    if changed.any():
        put = new[changed]
        levels.put(put, q.reshape(-1, block)[changed])
        new[changed] = put
    if old is not None:
        new[~changed] = old[~changed]


def _nearer(
    name: str, levels: Levels, new: np.ndarray, old: np.ndarray, w: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """Of each block the newly fitted one, or the old one with its levels nearest to w: the one that
    comes nearer to it."""
    offset, step = levels.grid(old)
    q = np.zeros(w.shape, np.uint8)
    none = np.zeros_like(w)
    _keep_rows(q, offset, step, w, none, none, (levels.values, levels.is_even))
    again = old.copy()
    levels.put(again, q)
    errors = []
    for blocks in (new, again):
        x = np.empty_like(w)
        UNPACK[name](x, np.ascontiguousarray(blocks), len(blocks))
        errors.append((c * np.square(x - w)).sum(axis=1))
    return np.where((errors[1] <= errors[0])[:, None], again, new)
