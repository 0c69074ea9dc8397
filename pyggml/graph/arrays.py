"""The arrays of tensors that have memory on the host: those of leaves are read and written."""

from collections.abc import Iterable
from operator import attrgetter, is_not
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml.errors import GraphError
from pyggml.graph.tensor import Tensor


def read(t: Tensor) -> np.ndarray:
    """A copy of the numbers of a leaf, or of a node that the CPU computed."""
    return np.array(array(t), order="C")


def has_memory(t: Tensor) -> bool:
    """Whether a leaf has its array already."""
    return (t if t.base is None or t.op is None else t.base).data is not None


def write(t: Tensor, values: npt.ArrayLike) -> None:
    """Set the numbers of a leaf: an input, a parameter. Programs that read it see them.

    GraphError for a leaf whose array is read-only.
    """
    to = array(t)
    if not to.flags.writeable:
        raise GraphError(f"{t!r}: its array is read-only, as that of a weight in a file")
    to[...] = values


def copy_rows(t: Tensor, source: int, target: int, n: int) -> None:
    """Rows target … target + n of a leaf become what rows source … were."""
    rows = array(t)
    rows[target : target + n] = rows[source : source + n]


def detach(*tensors: Tensor) -> None:
    """Take tensors, of any device, their memory away; it is free once nobody else has it."""
    for t in tensors:
        t.data = None


LeafArrays = tuple[tuple[Tensor, ...], tuple[Any, ...]]
_data_of = attrgetter("data")


def leaf_arrays(leaves: Iterable[Tensor]) -> LeafArrays:
    """Leaves, and the arrays that they have now."""
    every = tuple(leaves)
    return every, tuple(map(_data_of, every))


def expect_held(leaves: LeafArrays) -> None:
    """GraphError for a leaf that was given another array: kernels still read the first one."""
    if not any(map(is_not, map(_data_of, leaves[0]), leaves[1])):  # asked before every run
        return
    for leaf, data in zip(*leaves, strict=True):
        if leaf.data is not data and leaf.data is not None:
            raise GraphError(
                f"{leaf!r} has another array than when the program was bound: write the new "
                "numbers into that, as leaf.data[...] = new, or bind again"
            )


def is_constant(leaf: Tensor) -> bool:
    """Whether a leaf's array is read-only, as a mapped weight is: its numbers never change."""
    return not array(leaf).flags.writeable


def stored_shape(t: Tensor) -> tuple[int, ...]:
    """The shape of the array that holds t: a quantised row counts its bytes."""
    if not t.dtype.quantised:
        return t.shape
    return (*t.shape[:-1], t.dtype.row_bytes(t.shape[-1]))


def array(t: Tensor) -> np.ndarray:
    """The NumPy array of a tensor that has memory, never a copy; a view's looks into its base's."""
    if t.base is None or t.op is None:
        assert t.data is not None, f"{t!r} has no memory yet"
        return t.data
    base = t.base.data
    assert base is not None, f"{t.base!r} has no memory yet"
    strides = (*t.strides[:-1], 1) if t.dtype.quantised else t.strides
    return np.ndarray(stored_shape(t), t.dtype.numpy, _bytes_of(base), t.offset, strides)


def _bytes_of(base: np.ndarray) -> np.ndarray:
    """The memory from the first element to the last as uint8, gaps included; never a copy."""
    if base.flags.c_contiguous:
        return base.reshape(-1).view(np.uint8)
    first = base[(slice(0, 1),) * base.ndim].reshape(1).view(np.uint8)
    steps = zip(base.shape, base.strides, strict=True)
    n_bytes = base.itemsize + sum((n - 1) * step for n, step in steps)
    return np.lib.stride_tricks.as_strided(first, (n_bytes,), (1,))
