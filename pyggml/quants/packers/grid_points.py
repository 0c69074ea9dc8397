"""The grids of IQ1 to IQ3 for packing: points by levels, and the points near any levels.

The numbers of a grid, in rising order, are its levels 0, 1, …; the levels of a group of weights,
read as digits, are the group's code. Levels that are no point are moved to one of those near them.

Source: ggml, src/ggml-quants.c (`iq2xs_init_impl`, `iq3xs_init_impl`).
"""

from functools import cache
from typing import NamedTuple

import numpy as np

# How many of the distances that occur, from the smallest on, make a point near.
_RINGS = {"IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 1, "IQ3_XXS": 2, "IQ3_S": 3, "IQ1_S": 3}


class Grid(NamedTuple):
    """The points of a grid, and those near each code.

    levels   uint8 (n_points, group)
    point    int32 (n_codes,): the point with these levels, or −1
    start    int32 (n_codes + 1,): `near[start[c] : start[c + 1]]` are the points near code c, the
             nearest first, of equally near ones the first; none if c is itself a point
    near     uint16
    """

    levels: np.ndarray
    point: np.ndarray
    start: np.ndarray
    near: np.ndarray


@cache
def numbers_of(name: str) -> np.ndarray:
    """The points of type `name`, int8 (n_points, 4 or 8), from the `gguf` package."""
    from gguf import quants

    source = getattr(quants, name)
    source.init_grid()
    return source.grid.reshape(-1, source.grid.shape[-1]).astype(np.int8)


@cache
def grid(name: str) -> Grid:
    """The grid of type `name`, made at its first use: 20 to 400 ms."""
    points = numbers_of(name)
    group = points.shape[-1]
    numbers, levels = np.unique(points, return_inverse=True)
    levels, n = np.asarray(levels).reshape(-1, group), len(numbers)
    places = n ** np.arange(group)
    codes = np.arange(n**group)
    index = np.full(len(codes), -1, np.int32)
    index[levels @ places] = np.arange(len(levels))

    off = np.flatnonzero(index < 0)
    distances = _distances(off[:, None] // places % n, levels)
    reach = np.full(len(off), -1, distances.dtype)
    for _ in range(_RINGS[name]):
        reach = np.where(distances > reach[:, None], distances, np.inf).min(axis=1)
    which, point = np.nonzero(distances <= reach[:, None])
    order = np.lexsort((point, distances[which, point], which))
    counts = np.bincount(off[which], minlength=len(codes))
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Grid(levels.astype(np.uint8), index, start, point[order].astype(np.uint16))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances of a (n, group) and b (m, group), whole numbers: float32 (n, m), exact."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    return (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * a @ b.T
