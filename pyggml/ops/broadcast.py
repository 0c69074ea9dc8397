"""ggml's broadcasting: the smaller tensor is repeated along every axis until it is as large.

Shapes are right-aligned and padded with leading ones to four axes; each axis of the smaller must
divide that of the larger, so (3, 4, 5) takes (5,), (1, 4, 1) and also (3, 2, 5).
"""

from __future__ import annotations

import numpy as np

from pyggml.errors import ShapeError
from pyggml.tensor import MAX_AXES, Shape, Tensor


def padded(shape: Shape) -> Shape:
    """Leading ones until there are four axes."""
    return (*(1,) * (MAX_AXES - len(shape)), *shape)


def tiles(small: Shape, large: Shape) -> bool:
    """Whether a tensor of shape `small` repeats to `large`; no elements repeat to none."""
    pairs = zip(padded(small), padded(large), strict=False)
    return len(large) <= MAX_AXES and all(s == n or (s > 0 and n % s == 0) for s, n in pairs)


def copies(small: Shape, large: Shape) -> tuple[tuple[int, int], ...]:
    """For each of four axes: how often the smaller is repeated, and its size."""
    pairs = zip(padded(small), padded(large), strict=True)
    return tuple((n // s if s else 1, s) for s, n in pairs)


def expect_tiles(op: str, what: str, t: Tensor, shape: Shape) -> None:
    """ShapeError unless t repeats to `shape`."""
    if not tiles(t.shape, shape):
        raise ShapeError(f"{op}: {what} is {t!r}, wanted axes that divide those of {list(shape)}")


def drawn_tiles(rng: np.random.Generator) -> tuple[Shape, Shape]:
    """For samples: four axes, and a shape that is repeated along some of them."""
    times, small = rng.integers(1, 4, (2, MAX_AXES))
    return tuple((times * small).tolist()), tuple(small.tolist())


def tiled(a: np.ndarray, shape: Shape) -> np.ndarray:
    """a repeated to `shape`, in NumPy; what the references use."""
    counts = [times for times, _ in copies(a.shape, shape)]
    return np.tile(a.reshape(padded(a.shape)), counts).reshape(shape)


def untiled(a: np.ndarray, shape: Shape) -> np.ndarray:
    """The sum of the tiles of `shape` that a consists of; the transpose of `tiled`."""
    split = [k for axis in copies(shape, a.shape) for k in axis]
    return np.asarray(a.reshape(split).sum(axis=(0, 2, 4, 6)).reshape(shape))
