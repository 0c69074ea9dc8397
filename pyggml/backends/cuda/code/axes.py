"""Tensors of up to four axes, as kernels get them: sizes, and steps in elements."""

from math import prod
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.jit import device
from pyggml.graph.tensor import MAX_AXES, Shape, Tensor

Four = tuple[np.int64, ...]


def sizes(shape: Shape) -> Four:
    """Four sizes: leading ones, then the shape."""
    return tuple(np.int64(n) for n in (*(1,) * (MAX_AXES - len(shape)), *shape))


def steps(t: Tensor) -> Four:
    """Four steps from element to element along each axis, in elements: zeros first."""
    return steps_of(tuple(s // t.dtype.block_bytes for s in t.strides))


def steps_of(in_elements: Shape) -> Four:
    """The same of steps that are in elements already."""
    return tuple(np.int64(n) for n in (*(0,) * (MAX_AXES - len(in_elements)), *in_elements))


def along_one_axis(large: Shape, small: Shape) -> tuple[np.uint32, np.uint32] | None:
    """(n, times) if the larger shape is the smaller one with all runs of n elements repeated so
    often, each beside itself; None if it is not, or too large for 32 bits."""
    both = tuple(zip(sizes(large), sizes(small), strict=True))
    axes = [i for i, (one, other) in enumerate(both) if one != other]
    if not axes or not 0 < prod(large) < 1 << 31:
        return None
    repeated = both[axes[0] : axes[-1] + 1]
    if len(axes) > 1 and any(m != 1 for _, m in repeated):
        return None
    n = prod(int(m) for _, m in both[axes[0] :])
    return np.uint32(n), np.uint32(prod(int(k) // int(m) for k, m in repeated))


@device
def _place_in_whole(i, n, _):
    return np.int64(np.uint32(i) % n)


@device
def _place_in_large(i, n, _):
    return i % n


@device
def _place_in_run(i, n, times):
    i = np.uint32(i)
    return np.int64(i // (n * times) * n + i % n)


def repeated_places(large: Shape, small: Shape) -> tuple[Any, Any, Any]:
    """(place, and two further arguments of place(i, …)): where element i of a larger tensor takes
    its number in a smaller one, which is repeated to it as tiles: whole ones one after the other,
    along one axis, or any."""
    many, few = sizes(large), sizes(small)
    last = len(few) - 1
    first = next(i for i, n in enumerate(few) if n != 1 or i == last)
    if few[first + 1 :] == many[first + 1 :] and (few[first] == many[first] or first == last):
        if prod(large) < 1 << 31:  # of 32 bits division is faster
            return _place_in_whole, np.uint32(prod(small)), 0
        return _place_in_large, np.int64(prod(small)), 0
    runs = along_one_axis(large, small)
    return (tile_offset, many, few) if runs is None else (_place_in_run, *runs)


@device
def offset_of(i, shape, step):
    """Where element i, counted along the last axis first, lies at these steps."""
    j = i // shape[3]
    k = j // shape[2]
    outer = k // shape[1]
    return (
        outer * step[0]
        + (k - outer * shape[1]) * step[1]
        + (j - k * shape[2]) * step[2]
        + (i - j * shape[3]) * step[3]
    )


@device
def tile_offset(i, shape, small):
    """Where element i of a tensor of this shape takes its number in a smaller one that is repeated
    to it as tiles."""
    j = i // shape[3]
    k = j // shape[2]
    at = (k // shape[1]) % small[0]
    at = at * small[1] + (k % shape[1]) % small[1]
    at = at * small[2] + (j % shape[2]) % small[2]
    return at * small[3] + (i % shape[3]) % small[3]
