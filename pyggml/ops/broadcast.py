"""ggml's broadcasting: the smaller tensor is repeated along every axis until it is as large.

Shapes are right-aligned and padded with leading ones to four axes; each axis of the smaller must
divide that of the larger, so (3, 4, 5) takes (5,), (1, 4, 1) and also (3, 2, 5).
"""

from __future__ import annotations

from math import prod

import numpy as np

from pyggml.errors import ShapeError
from pyggml.tensor import Shape, Tensor

MAX_AXES = 4  # GGML_MAX_DIMS


def padded(shape: Shape) -> Shape:
    """Leading ones until there are four axes; superfluous ones in front are dropped."""
    extra = len(shape) - MAX_AXES
    if extra > 0 and prod(shape[:extra]) == 1:
        shape = shape[extra:]
    return (*(1,) * (MAX_AXES - len(shape)), *shape)


def tiles(small: Shape, large: Shape) -> bool:
    """Whether a tensor of shape `small` repeats to `large`."""
    pairs = zip(padded(small), padded(large), strict=True)
    return all(s > 0 and n % s == 0 for s, n in pairs)


def expect_tiles(op: str, what: str, t: Tensor, shape: Shape) -> None:
    """ShapeError unless t repeats to `shape`."""
    if not tiles(t.shape, shape):
        raise ShapeError(f"{op}: {what} is {t!r}, wanted axes that divide those of {list(shape)}")


def tiled(a: np.ndarray, shape: Shape) -> np.ndarray:
    """a repeated to `shape`, in NumPy; what the references use."""
    small, large = padded(a.shape), padded(shape)
    counts = [n // s for s, n in zip(small, large, strict=True)]
    return np.tile(a.reshape(small), counts).reshape(shape)


def untiled(a: np.ndarray, shape: Shape) -> np.ndarray:
    """The sum of the tiles of `shape` that a consists of; the transpose of `tiled`."""
    small, large = padded(shape), padded(a.shape)
    split = [k for s, n in zip(small, large, strict=True) for k in (n // s, s)]
    return np.asarray(a.reshape(split).sum(axis=(0, 2, 4, 6)).reshape(shape))
