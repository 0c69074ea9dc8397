"""ggml's broadcasting: the smaller tensor is repeated along every axis until it is as large.

Shapes get leading ones until they have four axes. Each axis of the smaller must divide that of the
larger, so (3, 4, 5) takes (5,), (1, 4, 1) and also (3, 2, 5).
"""

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.tensor import MAX_AXES, Shape, Tensor


def four_axes(shape: Shape) -> Shape:
    """The shape with leading ones until it has four axes."""
    return (*(1,) * (MAX_AXES - len(shape)), *shape)


def tiles(small: Shape, large: Shape) -> bool:
    """Whether a tensor of shape `small` repeats to `large`; no elements repeat to none."""
    pairs = zip(four_axes(small), four_axes(large), strict=False)
    return len(large) <= MAX_AXES and all(s == n or (s > 0 and n % s == 0) for s, n in pairs)


def copies(small: Shape, large: Shape) -> tuple[tuple[int, int], ...]:
    """For each of the four axes: how often the smaller is repeated, and its size."""
    pairs = zip(four_axes(small), four_axes(large), strict=True)
    return tuple((n // s if s else 1, s) for s, n in pairs)


def expect_tiles(op: str, what: str, t: Tensor, shape: Shape) -> None:
    """ShapeError unless t repeats to `shape`."""
    if not tiles(t.shape, shape):
        raise ShapeError(f"{op}: {what} is {t!r}, wanted axes that divide those of {list(shape)}")


def drawn_tiles(rng: np.random.Generator) -> tuple[Shape, Shape]:
    """For samples: a drawn shape of four axes, and one that repeats to it."""
    times, small = rng.integers(1, 4, (2, MAX_AXES))
    return tuple((times * small).tolist()), tuple(small.tolist())


def tile_to(a: np.ndarray, shape: Shape) -> np.ndarray:
    """a repeated to `shape`, in NumPy, for references."""
    counts = [times for times, _ in copies(a.shape, shape)]
    return np.tile(a.reshape(four_axes(a.shape)), counts).reshape(shape)


def sum_tiles(a: np.ndarray, shape: Shape) -> np.ndarray:
    """The sum of the tiles of this shape that make up a; the transpose of `tile_to`."""
    split = [k for axis in copies(shape, a.shape) for k in axis]
    return np.asarray(a.reshape(split).sum(axis=(0, 2, 4, 6)).reshape(shape))
