"""What every device knows of ops that are linear along each axis by itself (resample.py): which
elements make up each result.

An axis is a pair (i, w) of arrays (n_out, n_taps): the indices of the elements that make up each
result, and their weights. A weight of 0 skips its element.
"""

from collections.abc import Callable

import numpy as np

from pyggml.graph.tensor import Shape

Axis = tuple[np.ndarray, np.ndarray]  # indices int64, weights float32
Axes = Callable[..., list[Axis]]  # (x's shape, **params) -> one Axis for each of its axes

AXES: dict[str, Axes] = {}  # by the op's name; each op enters its own


def axis_of_indices(indices: np.ndarray) -> Axis:
    """The axis whose result i is element indices[i], or 0 for a negative index."""
    column = indices.reshape(-1, 1)
    return np.maximum(column, 0), (column >= 0).astype(np.float32)


def transposed_axis(axis: Axis, n: int) -> Axis:
    """The axis (n, most) of the gradient: which results each of n elements is part of."""
    index, weight = axis
    results, taps = np.nonzero(weight)
    elements, weights = index[results, taps], weight[results, taps]
    order = np.argsort(elements, kind="stable")
    counts = np.bincount(elements, minlength=n)
    tap = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    taps = np.zeros((n, max(counts.max(initial=0), 1)), np.int64)
    shares = np.zeros(taps.shape, np.float32)
    taps[elements[order], tap] = results[order]
    shares[elements[order], tap] = weights[order]
    return taps, shares


def shape_of(axes: list[Axis]) -> Shape:
    """The shape of what the axes make."""
    return tuple(len(index) for index, _ in axes)
