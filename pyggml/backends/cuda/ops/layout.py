"""Copies: without gaps, of another type, into a range, as tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.axes import offset_of, sizes, steps, steps_of, tile_offset
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.fours import (
    load_four,
    load_four_bf16,
    put_four_bf16,
    store_four,
    vectorizable,
)
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import in_turn, per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, DType
from pyggml.graph.tensor import Shape, Tensor, contiguous_strides

# -- numbers of one type to another -------------------------------------------------------------


@device
def as_it_is(x):
    return x


@device
def bf16_to_float(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def conversion(of: DType, to: DType) -> Callable:
    """What makes a number of one type one of another; F32 and F16 convert when they are stored."""
    if (of is BF16) == (to is BF16):
        return as_it_is
    return bf16_to_float if of is BF16 else bf16_bits


# -- cont, dup, cpy, concat, narrow_back --------------------------------------------------------


def _copies(convert: Callable):
    @kernel
    def flat(out, x):
        apart = cuda.gridsize(1)
        for i in range(cuda.grid(1), out.size, 2 * apart):
            j = min(i + apart, out.size - 1)
            first, second = x[i], x[j]  # two loads under way
            out[i] = convert(first)
            if i + apart < out.size:
                out[j] = convert(second)

    @kernel
    def gathered(out, x, steps, shape):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = convert(x[offset_of(i, shape, steps)])

    return flat, gathered


_FLAT, _GATHERED = {}, {}
for _convert in (as_it_is, bf16_to_float, bf16_bits):
    _FLAT[_convert], _GATHERED[_convert] = _copies(_convert)


@kernel
def _four_by_four(out, x):
    for four in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
        store_four(out, 4 * four, *load_four(x, 4 * four))


@kernel
def _fours_to_bf16(out, x):
    for four in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
        put_four_bf16(out, 4 * four, *load_four(x, 4 * four))


@kernel
def _fours_of_bf16(out, x):
    for four in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
        store_four(out, 4 * four, *load_four_bf16(x, 4 * four))


# By the types of source and result; bfloat16 is uint16.
_FOURS = {
    (np.float32, np.float32): _four_by_four,
    (np.float32, np.uint16): _fours_to_bf16,
    (np.uint16, np.float32): _fours_of_bf16,
}


def copied(out: Any, x: Any, t: Tensor, stream: Any, convert: Callable = as_it_is) -> Call:
    """out, which has no gaps, = the numbers of x, which lie as those of t do."""
    types = x.dtype.type, out.dtype.type
    if t.is_contiguous and types in _FOURS and vectorizable(out, x):
        return per_element(_FOURS[types], out.size // 4, stream, out, x)
    if t.is_contiguous:
        return per_element(_FLAT[convert], out.size, stream, out, x)
    return per_element(_GATHERED[convert], out.size, stream, out, x, steps(t), sizes(t.shape))


def _copy(site: Site) -> Call:
    (x,) = site.node.src
    convert = conversion(x.dtype, site.node.dtype)
    return copied(site.out, site.src[0], x, site.stream, convert)


@kernel
def _put(out, first, out_steps, x, x_steps, shape):
    n = shape[0] * shape[1] * shape[2] * shape[3]
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        out[first + offset_of(i, shape, out_steps)] = x[offset_of(i, shape, x_steps)]


def _into(site: Site, first: int, x: Tensor, array: Any) -> Call:
    """Copy x into the range of the result that begins at element `first`."""
    where = (first, steps_of(_elements(site.node)))
    of_x = (array, steps(x), sizes(x.shape))
    return per_element(_put, x.n_elements, site.stream, site.out, *where, *of_x)


def _elements(t: Tensor) -> Shape:
    """The steps of a tensor without gaps, in elements."""
    return tuple(s // t.dtype.block_bytes for s in contiguous_strides(t.shape, t.dtype))


def _blocks_with_gaps(node: Tensor) -> str | None:
    x = node.src[0]
    return f"{x.dtype} with gaps" if x.dtype.quantised and not x.is_contiguous else None


def _concat(site: Site) -> Call:
    a, b = site.node.src
    axis = site.node.params["axis"]
    second = a.shape[axis] * _elements(site.node)[axis]
    return in_turn(_into(site, 0, a, site.src[0]), _into(site, second, b, site.src[1]))


@kernel
def _fill(out, value):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = value


def filled(site: Site, value: np.float32) -> Call:
    """One value everywhere in the result."""
    return per_element(_fill, site.out.size, site.stream, site.out, value)


def _narrow_back(site: Site) -> Call:
    (dy,) = site.node.src
    first = site.node.params["start"] * _elements(site.node)[site.node.params["axis"]]
    return in_turn(filled(site, ZERO), _into(site, first, dy, site.src[0]))


def _filled(site: Site) -> Call:
    return filled(site, *site.scalars)


# -- repeat, repeat_back ------------------------------------------------------------------------


@kernel
def _repeat(out, x, shape, small):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = x[tile_offset(i, shape, small)]


@kernel
def _repeat_back(out, x, shape, small, first_steps, tile_steps, times):
    """Element i of the result is the sum over all tiles, in their order."""
    n_tiles = times[0] * times[1] * times[2] * times[3]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        at, total = offset_of(i, small, first_steps), ZERO
        for tile in range(n_tiles):
            total += x[at + offset_of(tile, times, tile_steps)]
        out[i] = total


def _tiles(site: Site) -> Call:
    shapes = sizes(site.node.shape), sizes(site.node.src[0].shape)
    return per_element(_repeat, site.out.size, site.stream, site.out, *site.src, *shapes)


def _tiles_back(site: Site) -> Call:
    (x,) = site.node.src
    shape, small, step = sizes(x.shape), sizes(site.node.shape), steps_of(_elements(x))
    tile_steps = tuple(np.int64(s * n) for s, n in zip(step, small, strict=True))
    times = tuple(np.int64(n // m) if m else np.int64(1) for n, m in zip(shape, small, strict=True))
    arguments = (shape, small, step, tile_steps, times)
    return per_element(_repeat_back, site.out.size, site.stream, site.out, *site.src, *arguments)


for _name in ("cont", "dup", "cpy"):
    declare(_name, Kernel(_copy, _blocks_with_gaps))
declare("concat", Kernel(_concat))
declare("narrow_back", Kernel(_narrow_back))
declare("fill", Kernel(_filled))
declare("repeat", Kernel(_tiles))
declare("repeat_back", Kernel(_tiles_back))
