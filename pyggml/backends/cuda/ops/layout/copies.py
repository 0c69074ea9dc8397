"""Copies without gaps, of another type, into a range, as tiles; windows; triangular matrices."""

from collections.abc import Callable
from functools import cache, partial
from math import isqrt
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.axes import (
    along_one_axis,
    offset_of,
    repeated_places,
    sizes,
    steps,
    steps_of,
)
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.fours import (
    load_four,
    load_four_bf16,
    store_four,
    sum_of_fours,
    vectorizable,
)
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits
from pyggml.backends.cuda.ops.reduce import row_sums
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, per_element, per_result
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.cuda.weights.unpack import round_fours
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F16, F32, I32, DType
from pyggml.graph.tensor import Shape, Tensor, contiguous_strides

# -- copies ---------------------------------------------------------------------------------------


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


# -- cont, dup, cpy, cpy_into, concat, narrow_back ------------------------------------------------


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
    def gather(out, x, steps, shape):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = convert(x[offset_of(i, shape, steps)])

    return flat, gather


_FLAT, _GATHERED = {}, {}
for _convert in (as_it_is, bf16_to_float, bf16_bits):
    _FLAT[_convert], _GATHERED[_convert] = _copies(_convert)


@kernel
def _four_by_four(out, x):
    for four in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
        store_four(out, 4 * four, *load_four(x, 4 * four))


@kernel
def _fours_of_bf16(out, x):
    for four in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
        store_four(out, 4 * four, *load_four_bf16(x, 4 * four))


# By the types of source and result; bfloat16 is uint16.
_FOURS = {
    (np.float32, np.float32): _four_by_four,
    (np.float32, np.uint16): round_fours,
    (np.uint16, np.float32): _fours_of_bf16,
}


def copy_of(out: Any, x: Any, t: Tensor, stream: Any, convert: Callable = as_it_is) -> Call:
    """out, which has no gaps, = the numbers of x, which lie as those of t do."""
    types = x.dtype.type, out.dtype.type
    if t.is_contiguous and types in _FOURS and vectorizable(out, x):
        return per_element(_FOURS[types], out.size // 4, stream, out, x)
    if t.is_contiguous:
        return per_element(_FLAT[convert], out.size, stream, out, x)
    return per_element(_GATHERED[convert], out.size, stream, out, x, steps(t), sizes(t.shape))


def _copy(site: CudaSite) -> Call:
    x = site.node.src[-1]
    convert = conversion(x.dtype, site.node.dtype)
    return copy_of(site.out, site.src[-1], x, site.stream, convert)


@kernel
def _put(out, first, out_steps, x, x_steps, shape):
    n = shape[0] * shape[1] * shape[2] * shape[3]
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        out[first + offset_of(i, shape, out_steps)] = x[offset_of(i, shape, x_steps)]


def _into(site: CudaSite, first: int, x: Tensor, array: Any) -> Call:
    """Copy x into the range of the result that begins at element `first`."""
    return per_element(
        _put, x.n_elements, site.stream, site.out, first,
        steps_of(_elements(site.node)), array, steps(x), sizes(x.shape),
    )  # fmt: skip


def _elements(t: Tensor) -> Shape:
    """The steps of a tensor without gaps, in elements."""
    return tuple(s // t.dtype.block_bytes for s in contiguous_strides(t.shape, t.dtype))


def _copy_lacks(node: Tensor) -> str | None:
    x = node.src[-1]
    if not node.is_contiguous:
        return f"a part of {node.src[0]!r} with gaps"
    if x.dtype is not node.dtype and not {x.dtype, node.dtype} <= {F32, F16, BF16}:
        return f"{x.dtype} to {node.dtype}"
    return f"{x.dtype} with gaps" if x.dtype.quantised and not x.is_contiguous else None


def _not_plain(node: Tensor) -> str | None:
    return None if node.dtype in (F32, I32) else f"{node.dtype} has no kernel here"


def _concat(site: CudaSite) -> Call:
    a, b = site.node.src
    axis = site.node.params["axis"]
    second = a.shape[axis] * _elements(site.node)[axis]
    return in_turn(_into(site, 0, a, site.src[0]), _into(site, second, b, site.src[1]))


@kernel
def _fill(out, value):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = value


def fill(site: CudaSite, value: np.float32) -> Call:
    """One value everywhere in the result."""
    return per_element(_fill, site.out.size, site.stream, site.out, value)


def _narrow_back(site: CudaSite) -> Call:
    (dy,) = site.node.src
    first = site.node.params["start"] * _elements(site.node)[site.node.params["axis"]]
    return in_turn(fill(site, ZERO), _into(site, first, dy, site.src[0]))


# -- repeat, repeat_back ------------------------------------------------------------------------

_LONG_SUM, _FEW_SUMS = 256, 1 << 15  # numbers that a sum has at least, sums at most: see _parts


@cache
def _repeating(place: Any) -> Any:
    @kernel
    def repeat(out, x, first, second):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = x[place(i, first, second)]

    return repeat


@kernel
def _add_runs(out, x, n, times):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        run = np.uint32(i) // n
        at, total = np.int64(run * n * times + (np.uint32(i) - run * n)), ZERO
        for _ in range(times):
            total += x[at]
            at += np.int64(n)
        out[i] = total


@kernel
def _add_runs_of_fours(out, x, n, times):
    """The same where runs are n fours."""
    for i in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
        a, b, c, d = sum_of_fours(x, i, n, times)
        store_four(out, 4 * i, a, b, c, d)


@kernel
def _repeat_back(out, x, shape, small, first_steps, tile_steps, times):
    """Element i of the result is the sum over all tiles, in their order."""
    n_tiles = times[0] * times[1] * times[2] * times[3]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        at, total = offset_of(i, small, first_steps), ZERO
        for tile in range(n_tiles):
            total += x[at + offset_of(tile, times, tile_steps)]
        out[i] = total


def _tiles(site: CudaSite) -> Call:
    place, *where = repeated_places(site.node.shape, site.node.src[0].shape)
    return per_result(_repeating(place), site, *where)


def _sums_of_runs(out: Any, x: Any, runs: tuple[np.uint32, np.uint32], stream: Any) -> Call:
    n, times = runs
    if n % 4 == 0 and vectorizable(out, x):
        return per_element(_add_runs_of_fours, out.size // 4, stream, out, x, n // 4, times)
    return per_element(_add_runs, out.size, stream, out, x, n, times)


def _parts(runs: tuple[np.uint32, np.uint32], n_sums: int) -> int:
    """Parts of long sums, each of which is added up by itself where there are few sums: a thread
    alone would take a millisecond for a few thousand numbers."""
    times = int(runs[1])
    if times < _LONG_SUM or n_sums > _FEW_SUMS or runs[0] == 1:
        return 1
    return max(n for n in range(1, isqrt(times) + 1) if times % n == 0)


def _tiles_back_scratch(node: Tensor, _compute: Compute) -> int:
    runs = along_one_axis(node.src[0].shape, node.shape)
    n_parts = 1 if runs is None else _parts(runs, node.n_elements)
    return F32.block_bytes * n_parts * node.n_elements if n_parts > 1 else 0


def _tiles_back(site: CudaSite) -> Call:
    (x,) = site.node.src
    runs = along_one_axis(x.shape, site.node.shape)
    if runs is not None and runs[0] == 1:
        return row_sums(site.out, site.src[0], int(runs[1]), site.stream)
    if runs is not None:
        n_parts = _parts(runs, site.out.size)
        if n_parts == 1:
            return _sums_of_runs(site.out, site.src[0], runs, site.stream)
        (n, of_sum), sums = runs, site.scratch.view(np.float32)[: n_parts * site.out.size]
        first, last = (n, np.uint32(of_sum // n_parts)), (n, np.uint32(n_parts))
        return in_turn(
            _sums_of_runs(sums, site.src[0], first, site.stream),
            _sums_of_runs(site.out, sums, last, site.stream),
        )
    shape, small, step = sizes(x.shape), sizes(site.node.shape), steps_of(_elements(x))
    tile_steps = tuple(np.int64(s * n) for s, n in zip(step, small, strict=True))
    times = tuple(np.int64(n // m) if m else np.int64(1) for n, m in zip(shape, small, strict=True))
    return per_result(_repeat_back, site, shape, small, step, tile_steps, times)


for _name in ("cont", "dup", "cpy", "cpy_into"):
    declare(_name, _copy, _copy_lacks)
declare("concat", _concat, lambda t: f"{t.dtype} is quantised" if t.dtype.quantised else None)
declare("narrow_back", _narrow_back)
declare("fill", lambda site: fill(site, *site.scalars))
declare("repeat", _tiles, _not_plain)
declare("repeat_back", _tiles_back, scratch=_tiles_back_scratch)


# -- windows of a tensor: numbers written into one, added to one ----------------------------------


@kernel
def _set(out, b, shape, steps, offset):
    for i in range(cuda.grid(1), b.size, cuda.gridsize(1)):
        out[offset + offset_of(i, shape, steps)] = b[i]


@kernel
def _add(out, b, shape, steps, offset):
    for i in range(cuda.grid(1), b.size, cuda.gridsize(1)):
        out[offset + offset_of(i, shape, steps)] += b[i]


def _overlaps(node: Tensor) -> str | None:
    """Additions to one number from several threads have no order."""
    window, reach = node.src[-1], 0
    for step, n in sorted(zip(node.params["strides"], window.shape, strict=True)):
        if n > 1 and step <= reach:
            return "a window whose elements overlap"
        reach += (n - 1) * step
    return None


def _after(first: Callable[[CudaSite], Call], run: Any) -> Callable[[CudaSite], Call]:
    """`first` makes the whole, `run` puts the last source into its window."""

    def bind(site: CudaSite) -> Call:
        window, p = site.node.src[-1], site.node.params
        put = per_element(
            run, window.n_elements, site.stream, site.out, site.src[-1],
            sizes(window.shape), steps_of(p["strides"]), p["offset"],
        )  # fmt: skip
        return in_turn(first(site), put)

    return bind


def _first(site: CudaSite) -> Call:
    return copy_of(site.out, site.src[0], site.node.src[0], site.stream)


declare("acc", _after(_first, _add), _overlaps)
declare("set", _after(_first, _set), _not_plain)
declare("view_back", _after(lambda site: fill(site, ZERO), _add), _overlaps)


# -- triangular and diagonal matrices -------------------------------------------------------------


@kernel
def _tri(out, x, n, is_lower, first):
    """out = x where that lies `first` or more beyond the diagonal, else 0."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        beyond = i % n - i // n % n
        if is_lower:
            beyond = -beyond
        out[i] = x[i] if beyond >= first else ZERO


def _bind_tri(site: CudaSite) -> Call:
    n, kind = site.node.shape[-1], site.node.params["kind"]
    first = 0 if kind.endswith("_diag") else 1
    return per_result(_tri, site, n, kind.startswith("lower"), first)


@kernel
def _solve(x, a, b, n, m, transposed):
    """X of A X = B or Aᵀ X = B, a thread for each column: each row after those that it needs."""
    for e in range(cuda.grid(1), x.size // n, cuda.gridsize(1)):
        matrix, column = e // m, e % m
        of_a, of_x = matrix * n * n, matrix * n * m + column
        for step in range(n):
            i = n - 1 - step if transposed else step
            rest = b[of_x + i * m]
            for n_solved in range(step):
                t = n - 1 - n_solved if transposed else n_solved
                factor = a[of_a + t * n + i] if transposed else a[of_a + i * n + t]
                rest -= factor * x[of_x + t * m]
            x[of_x + i * m] = rest / a[of_a + i * n + i]


def _bind_solve(site: CudaSite, transposed: bool) -> Call:
    n, m = site.node.shape[-2:]
    columns = site.out.size // n
    return per_element(_solve, columns, site.stream, site.out, *site.src, n, m, transposed)


def _by_width(run: Any, site: CudaSite) -> Call:
    """The kernel gets the numbers of a row of the result."""
    return per_result(run, site, site.node.shape[-1])


@kernel
def _diag(out, x, n):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        row = i // n
        out[i] = x[row // n * n + i % n] if row % n == i % n else ZERO


@kernel
def _diag_back(out, dy, n):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = dy[i * n + i % n]


declare("tri", _bind_tri)
declare("solve_tri", partial(_bind_solve, transposed=False))
declare("solve_tri_t", partial(_bind_solve, transposed=True))
for _name, _run in (("diag", _diag), ("diag_back", _diag_back)):
    declare(_name, partial(_by_width, _run))
