"""The order of the numbers of a row: the greatest, the k greatest, all; equal ones keep theirs."""

import numpy as np

from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.order import order_of
from pyggml.backends.cuda.code.warp import LANES, warp_max
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, launch, per_element, per_result, per_row
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call

_MOST_OF_WARP, _MOST_BEST = 512, 32  # numbers of a row, and how many of them a warp picks
_LAST_INDEX = (1 << 20) - 1


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


def _bind_argmax(site: CudaSite) -> Call:
    n = site.node.src[0].shape[-1]
    return per_row(_argmax, site.out.size, n, site.stream, site.out, *site.src, n)


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


def _argsort(site: CudaSite) -> Call:
    n = site.node.shape[-1]
    return per_result(_rank, site, n, n, bool(site.node.params["descending"]))


def _top_k(site: CudaSite) -> Call:
    x, k = site.node.src[0], site.node.params["k"]
    if k and x.shape[-1] <= _MOST_OF_WARP and k <= _MOST_BEST:
        grid = small(min(site.out.size // k, 1 << 16))
        return launch(_best, grid, LANES, site.stream, site.out, *site.src, x.shape[-1], k)
    return per_element(_rank, x.n_elements, site.stream, site.out, *site.src, x.shape[-1], k, True)


declare("argmax", _bind_argmax)
declare("argsort", _argsort)
declare("top_k", _top_k)
