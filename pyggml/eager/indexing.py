"""x[key] as NumPy means it, made of views and of `get_rows`.

An index is an integer, a slice with a positive step, None for a new axis, or `...`. One array of
integers or booleans chooses rows of the first axis; one for each axis of a matrix chooses elements.
"""

from typing import Any

import numpy as np

from pyggml import ops
from pyggml.errors import ShapeError
from pyggml.graph.tensor import Tensor, leaf


def index(x: Tensor, key: Any) -> Tensor:
    """x[key], F32. Raises ShapeError for a key that the shape does not have."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(_is_array(k) for k in keys):
        if not all(_is_array(k) or _is_whole(k) for k in keys):
            raise ShapeError("index: an array beside a slice, wanted one after the other")
        return _pick(x, [np.asarray(k) for k in keys])
    return _slice(x, keys)


def _is_array(k: Any) -> bool:
    return isinstance(k, np.ndarray | list | range)


def _is_whole(k: Any) -> bool:
    return isinstance(k, int | np.integer) and not isinstance(k, bool)


def _pick(x: Tensor, arrays: list[np.ndarray]) -> Tensor:
    """Rows by one array of numbers, or elements of a matrix by two."""
    if len(arrays) > 2 or len(arrays) > len(x.shape):
        raise ShapeError(f"index: {len(arrays)} arrays for shape {x.shape}, wanted one, or two")
    ids = [_numbers(a, n) for a, n in zip(arrays, x.shape, strict=False)]
    shape = np.broadcast_shapes(*(i.shape for i in ids))
    if len(ids) == 1:
        table = ops.reshape(x, (x.shape[0], -1))
        rows = ops.get_rows(table, leaf(ids[0].reshape(-1)))
        return ops.reshape(rows, (*shape, *x.shape[1:]))
    if len(x.shape) != 2:
        raise ShapeError(f"index: two arrays for shape {x.shape}, wanted a matrix")
    flat = np.asarray(ids[0] * x.shape[1] + ids[1], np.int32).reshape(-1)
    rows = ops.get_rows(ops.reshape(x, (x.n_elements, 1)), leaf(flat))
    return ops.reshape(rows, shape)


def _numbers(a: np.ndarray, n: int) -> np.ndarray:
    """Positions of an axis of length n, int32, none below 0."""
    if a.dtype == bool:
        if a.shape != (n,):
            raise ShapeError(f"index: a mask of shape {a.shape}, wanted ({n},)")
        return np.flatnonzero(a).astype(np.int32)
    if a.dtype.kind not in "iu":
        raise ShapeError(f"index: an array of {a.dtype}, wanted integers or booleans")
    if a.size and not -n <= a.min() <= a.max() < n:
        raise ShapeError(f"index: {a.max() if a.max() >= n else a.min()} is none of {n} positions")
    return np.where(a < 0, a + n, a).astype(np.int32)


def _slice(x: Tensor, keys: tuple[Any, ...]) -> Tensor:
    shape = list[int]()
    axis = 0
    for k in _complete(keys, len(x.shape)):
        if k is None:
            shape.append(1)
            continue
        first, n, step = _range(k, x.shape[axis], axis)
        if n != x.shape[axis]:
            x = _cut(x, axis, first, n, step)
        if isinstance(k, slice):
            shape.append(n)
        axis += 1
    return x if tuple(shape) == x.shape else ops.reshape(x, tuple(shape))


def _complete(keys: tuple[Any, ...], n_axes: int) -> list[Any]:
    """The keys with `...` written out, one for each axis besides those that are None."""
    n_given = sum(k is not None and k is not Ellipsis for k in keys)
    if n_given > n_axes:
        raise ShapeError(f"index: {n_given} indices for {n_axes} axes")
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    return [*keys[:at], *[slice(None)] * (n_axes - n_given), *keys[at + 1 :]]


def _range(k: Any, size: int, axis: int) -> tuple[int, int, int]:
    """The first position, how many, and the step of an index into an axis of this size."""
    if isinstance(k, slice):
        first, stop, step = k.indices(size)
        if step < 1:
            raise ShapeError(f"index: a step of {step}, wanted 1 or more")
        if (n := len(range(first, stop, step))) < min(size, 1):
            raise ShapeError(f"index: {k.start}:{k.stop} of axis {axis} of {size} is empty")
        return first, n, step
    if not _is_whole(k):
        raise ShapeError(f"index: {k!r}, wanted an integer, a slice, None, ... or an array")
    if not -size <= k < size:
        raise ShapeError(f"index: {k} is none of {size} positions of axis {axis}")
    return int(k) % size, 1, 1


def _cut(x: Tensor, axis: int, first: int, n: int, step: int) -> Tensor:
    if step == 1:
        return ops.narrow(x, axis, first, n)
    x = ops.cont(x)
    strides = list(x.strides)
    offset = first * strides[axis]
    strides[axis] *= step
    return ops.view(x, (*x.shape[:axis], n, *x.shape[axis + 1 :]), tuple(strides), offset)
