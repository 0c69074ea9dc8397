"""Arithmetic of tensors: see pyggml/ops/arithmetic. Sums are in float64, as on the host."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import HALF, ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.order import order_of
from pyggml.backends.cuda.code.warp import LANES, warp_max
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import (
    THREADS,
    in_turn,
    launch,
    per_element,
    per_row,
    per_rows,
)
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.ops.arithmetic.dropout import quarters

# -- reductions -----------------------------------------------------------------------------------


_PIECE = 1 << 14  # elements that one block adds up


@kernel
def _row_sums(out, x, n, divisor):
    """out_r = Σ of row r / divisor; the last row may be shorter than n."""
    parts = cuda.shared.array(THREADS, np.float64)
    for row in range(first_row(), out.size, rows_apart()):
        last, total = min((row + 1) * n, x.size), np.float64(0)
        for i in range(row * n + cuda.threadIdx.x, last, cuda.blockDim.x):
            total += x[i]
        total = block_sum(total, parts)
        if cuda.threadIdx.x == 0:
            out[row] = total / divisor


def row_sums(out: Any, x: Any, n: int, divisor: float, stream: Any) -> Call:
    """A call for out_r = Σ of row r of n numbers / divisor; the last row may be shorter."""
    return per_rows(_row_sums, out.size, n, stream, out, x, n, np.float64(divisor))


def _by_row(is_mean: bool) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        n = site.node.src[0].shape[-1]
        return row_sums(site.out, site.src[0], n, n if is_mean else 1, site.stream)

    return bind


def _n_pieces(x: Tensor) -> int:
    return max(1, -(-x.n_elements // _PIECE))


def _sum(site: Site) -> Call:
    sums = site.scratch.view(np.float64)
    return in_turn(
        row_sums(sums, site.src[0], _PIECE, 1, site.stream),
        row_sums(site.out, sums, sums.size, 1, site.stream),
    )


def _sum_scratch(node: Tensor, compute: str) -> int:
    return 8 * _n_pieces(node.src[0])


# -- cumsum -------------------------------------------------------------------------------------


@kernel
def _cumsum(out, x, n, backwards):
    """A thread has a row; out may be x."""
    for row in range(cuda.grid(1), out.size // n, cuda.gridsize(1)):
        total = ZERO
        for j in range(n):
            at = row * n + (n - 1 - j if backwards else j)
            total += x[at]
            out[at] = total


def _running(backwards: bool) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        n = site.node.shape[-1]
        n_rows = site.out.size // n
        return per_element(_cumsum, n_rows, site.stream, site.out, *site.src, n, backwards)

    return bind


# -- argmax, count_equal ------------------------------------------------------------------------


@kernel
def _argmax(out, x, n):
    """The first of equals: each thread has its own first, and the lower index wins."""
    best = cuda.shared.array(THREADS, np.int64)
    me = cuda.threadIdx.x
    for row in range(cuda.blockIdx.x, out.size, cuda.gridDim.x):
        at, mine = row * n, min(me, n - 1)
        for j in range(me, n, cuda.blockDim.x):
            if x[at + j] > x[at + mine]:
                mine = j
        best[me] = mine
        step = cuda.blockDim.x // 2
        cuda.syncthreads()
        while step > 0:
            if me < step:
                other = best[me + step]
                a, b = x[at + best[me]], x[at + other]
                if b > a or (b == a and other < best[me]):
                    best[me] = other
            cuda.syncthreads()
            step //= 2
        if me == 0:
            out[row] = best[0]
        cuda.syncthreads()


def _bind_argmax(site: Site) -> Call:
    n = site.node.src[0].shape[-1]
    return per_row(_argmax, site.out.size, n, site.stream, site.out, *site.src, n)


@kernel
def _count_equal(out, a, b, mask):
    """One block; the mask may have one element."""
    parts = cuda.shared.array(THREADS, np.int64)
    total = 0
    for i in range(cuda.threadIdx.x, a.size, cuda.blockDim.x):
        if a[i] == b[i] and mask[i % mask.size] > HALF:
            total += 1
    total = block_sum(total, parts)
    if cuda.threadIdx.x == 0:
        out[0] = total


def _bind_count(site: Site) -> Call:
    a, b, *mask = site.src
    weights: Any = mask[0] if mask else site.constant(np.ones(1, np.float32))
    return per_row(_count_equal, 1, a.size, site.stream, site.out, a, b, weights)


declare("sum", Kernel(_sum, scratch=_sum_scratch))
declare("sum_rows", Kernel(_by_row(False)))
declare("mean", Kernel(_by_row(True)))
declare("cumsum", Kernel(_running(False)))
declare("cumsum_back", Kernel(_running(True)))
declare("argmax", Kernel(_bind_argmax))
declare("count_equal", Kernel(_bind_count))


# -- the order of numbers, and what is made of positions ------------------------------------------


_MOST_OF_WARP, _MOST_BEST = 512, 32  # numbers of a row, and how many of them a warp picks
_LAST_INDEX = (1 << 20) - 1


@device
def _comes_before(a, i, b, j, descending):
    """Whether number a at i stands before b at j; equal ones keep their order, NaN comes last."""
    if a == b or (a != a and b != b):
        return i < j
    if a != a or b != b:
        return b != b
    return a > b if descending else a < b


@kernel
def _rank(out, x, n, n_kept, descending):
    """Each number counts those before it: that is its place. n² comparisons of a row."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, j = i // n, i % n
        place = 0
        for other in range(n):
            if _comes_before(x[row * n + other], other, x[i], j, descending):
                place += 1
        if place < n_kept:
            out[row * n_kept + place] = j


@device
def _key(x, i):
    """A whole number that is greater the earlier number x at i stands: NaN comes last."""
    order = order_of(x) if x == x else np.int64(0)
    return (order << 20) | (_LAST_INDEX - i)


@kernel
def _best(out, x, n, n_kept):
    """A warp for each row: it takes the greatest key n_kept times."""
    keys = cuda.shared.array(_MOST_OF_WARP, np.int64)
    lane = np.int64(cuda.threadIdx.x)
    for row in range(cuda.blockIdx.x, out.size // n_kept, cuda.gridDim.x):
        for i in range(lane, n, LANES):
            keys[i] = _key(x[row * n + i], i)
        for place in range(n_kept):
            best = np.int64(-1)
            for i in range(lane, n, LANES):
                best = max(best, keys[i])
            chosen = _LAST_INDEX - (warp_max(best) & _LAST_INDEX)
            if chosen % LANES == lane:
                keys[chosen] = -1
                out[row * n_kept + place] = chosen


def _argsort(site: Site) -> Call:
    n = site.node.shape[-1]
    arguments = (site.out, *site.src, n, n, bool(site.node.params["descending"]))
    return per_element(_rank, site.out.size, site.stream, *arguments)


def _top_k(site: Site) -> Call:
    x, k = site.node.src[0], site.node.params["k"]
    if k and x.shape[-1] <= _MOST_OF_WARP and k <= _MOST_BEST:
        grid = small(min(site.out.size // k, 1 << 16))
        return launch(_best, grid, LANES, site.stream, site.out, *site.src, x.shape[-1], k)
    return per_element(_rank, x.n_elements, site.stream, site.out, *site.src, x.shape[-1], k, True)


@kernel
def _window_span(out, span, window):
    for t in range(cuda.grid(1), out.size // 2, cuda.gridsize(1)):
        out[2 * t] = max(span[2 * t], span[2 * t + 1] - window)
        out[2 * t + 1] = span[2 * t + 1]


def _bind_span(site: Site) -> Call:
    window = np.int32(min(site.node.params["window"], 2**31 - 1))
    return per_element(_window_span, site.out.size // 2, site.stream, site.out, *site.src, window)


@kernel
def _chunk_span(out, span, positions, size):
    for t in range(cuda.grid(1), out.size // 2, cuda.gridsize(1)):
        out[2 * t] = max(span[2 * t], span[2 * t + 1] - 1 - positions[t] % size)
        out[2 * t + 1] = span[2 * t + 1]


def _bind_chunk(site: Site) -> Call:
    size = np.int32(min(site.node.params["size"], 2**31 - 1))
    return per_element(_chunk_span, site.out.size // 2, site.stream, site.out, *site.src, size)


@kernel
def _log_temperature(out, positions, strength, every, first):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = ONE + strength * math.log(ONE + np.float32((positions[i] + first) // every))


def _bind_temperature(site: Site) -> Call:
    arguments = (site.out, *site.src, *site.scalars)
    return per_element(_log_temperature, site.out.size, site.stream, *arguments)


declare("argsort", Kernel(_argsort))
declare("top_k", Kernel(_top_k))
declare("window_span", Kernel(_bind_span))
declare("chunk_span", Kernel(_bind_chunk))
declare("log_temperature", Kernel(_bind_temperature))


# -- random draws of training, the host's numbers -------------------------------------------------


_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10
_UNIT, _EIGHT = np.float32(2.0**-23), np.uint64(8)  # 24 random bits, which a float32 holds


@device
def _philox(column, row, stream, draw):
    """Philox4x32-10: four random words, uint64 below 2^32, of a column in a quarter of a row."""
    c0, c1, c2, c3 = np.uint64(column), np.uint64(row), stream, np.uint64(draw[2]) & _LOW
    k0, k1 = np.uint64(draw[0]) & _LOW, np.uint64(draw[1]) & _LOW
    for _ in range(_ROUNDS):
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@kernel
def _dropout(out, x, draw, stream, least, grown, n, quarter):
    """A thread draws the words of one column of all four quarters of a row."""
    for i in range(cuda.grid(1), out.size // n * quarter, cuda.gridsize(1)):
        row, column = i // quarter, i % quarter
        words = _philox(column, row, stream, draw)
        for w in range(4):
            j = w * quarter + column
            if j < n:
                at = row * n + j
                out[at] = x[at] * grown if words[w] >= least else ZERO


@kernel
def _noise(out, x, size, draw, stream, n, quarter):
    for i in range(cuda.grid(1), out.size // n * quarter, cuda.gridsize(1)):
        row, column = i // quarter, i % quarter
        words = _philox(column, row, stream, draw)
        for w in range(4):
            j = w * quarter + column
            if j < n:
                u = np.float32(words[w] >> _EIGHT) * _UNIT - ONE
                out[row * n + j] = x[row * n + j] + size[row] * u


def _bind_dropout(site: Site) -> Call:
    p, stream = site.node.params["p"], np.uint64(site.node.params["stream"])
    least = np.uint64(round(p * (1 << 32)))  # the least word whose element is kept
    n, quarter, jobs = quarters(site.node)
    arguments = (site.out, *site.src, stream, least, np.float32(1 / (1 - p)), n, quarter)
    return per_element(_dropout, jobs, site.stream, *arguments)


def _bind_noise(site: Site) -> Call:
    n, quarter, jobs = quarters(site.node)
    stream = np.uint64(site.node.params["stream"])
    return per_element(_noise, jobs, site.stream, site.out, *site.src, stream, n, quarter)


declare("dropout", Kernel(_bind_dropout))
declare("uniform_noise", Kernel(_bind_noise))
