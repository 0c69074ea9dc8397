"""Gradients of thin factors of one D at once, where rows are few: each is a launch of some µs else.

    dB += dyᵀ·u, of columns dy of D     dA += vᵀ·x, of further columns v of D

Both are products of a wide matrix, transposed, with few columns of another. A block takes 32
columns of a wide one; its warps share the rows, and their sums are added up in their order. The
numbers lie as in wide.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.lora.thin_tiles import ROWS, TILE_COLUMNS
from pyggml.backends.cuda.ops.lora.wide import COLUMNS, MANY_ROWS, columns
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite, OwnOp, is_of
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import Memory, Spec, over_first
from pyggml.graph.rewrite import Replacements, rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops import after

_WARPS, _MOST_RANK = 8, 16  # warps of a block


@device
def pair(x, column, row, step, m):
    """Numbers of a column of bfloat16 in two rows that follow each other, as a word."""
    low, high = x[min(row, m - 1) * step + column], x[min(row + 1, m - 1) * step + column]
    return np.uint32(low) | np.uint32(high) << np.uint32(16)


@device
def place_in_eights(group, half, e):
    """Which of a warp's 32 columns number e of a lane's sums is of, of tiles of numbers that were
    transposed: in its eights the pairs of the first or the second half."""
    return 8 * (group >> 1) + 4 * half + 2 * (e >> 1) + (group & 1)


@cache
def _kernel(n_tiles: int) -> Any:
    n = n_tiles * TILE_COLUMNS
    of_parts, of_sums = (_WARPS, COLUMNS * n), (2 * n_tiles, 4)

    @partial(kernel, most_threads=32 * _WARPS)
    def thin_sums(outs, wides, rights, firsts, forms, m):
        """forms: of each sum, columns of the wide matrix, its rank, numbers from row to row of both
        matrices, and from column to column and rank to rank of the sum."""
        parts = cuda.shared.array(of_parts, np.float32)
        sums = cuda.local.array(of_sums, np.float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, two = lane >> 2, 2 * (lane & 3)
        which = cuda.blockIdx.y
        k, rank, step, right_step, by_column, by_rank = forms[which]
        start = np.int64(cuda.blockIdx.x) * COLUMNS
        if start >= k:
            return
        x, right, column = wides[which], rights[which], start + 4 * two
        near_column, at_x, at_right = min(column, k - 8), firsts[which][0], firsts[which][1]
        for i in range(2 * n_tiles):
            for e in range(4):
                sums[i, e] = ZERO
        follow()
        for first in range(ROWS * warp, m, ROWS * _WARPS):
            low, high = first + group, first + group + 8
            a = ptx.load_words(x, 2 * (at_x + min(low, m - 1) * step + near_column))
            b = ptx.load_words(x, 2 * (at_x + min(high, m - 1) * step + near_column))
            of_low = np.uint32(0xFFFFFFFF) if low < m and column < k else np.uint32(0)
            of_high = np.uint32(0xFFFFFFFF) if high < m and column < k else np.uint32(0)
            for half in range(2):
                j = 2 * half
                transposed = (
                    ptx.transpose_8x8(a[j] & of_low), ptx.transpose_8x8(a[j + 1] & of_low),
                    ptx.transpose_8x8(b[j] & of_high), ptx.transpose_8x8(b[j + 1] & of_high),
                )  # fmt: skip
                for tile in range(n_tiles):
                    at = at_right + TILE_COLUMNS * tile + group
                    b0 = pair(right, at, first + two, right_step, m)
                    b1 = pair(right, at, first + two + 8, right_step, m)
                    ptx.add_tile(sums, 2 * tile + half, transposed, b0, b1)
        for tile in range(n_tiles):
            for half in range(2):
                for e in range(4):
                    at = place_in_eights(group, half, e)
                    place = at * n + TILE_COLUMNS * tile + two + (e & 1)
                    parts[warp, place] = sums[2 * tile + half, e]
        cuda.syncthreads()
        for e in range(cuda.threadIdx.x, COLUMNS * n, 32 * _WARPS):
            total, at, r = ZERO, start + e // n, e % n
            for other in range(_WARPS):
                total += parts[other, e]
            if at < k and r < rank:
                outs[which][at * by_column + r * by_rank] += total

    return follower(thin_sums)


class ThinSum(NamedTuple):
    """A gradient: whether it is that of B; where u or v begins; and of B, where dy does in D."""

    of_b: bool
    first: int
    column: int = 0


def _split(src: Sequence[Any]) -> tuple[Sequence[Any], Any, Any, Sequence[Any]]:
    """(what is added to, D, u, the x of each dA)."""
    n = len(src) // 2 - 1
    return src[:n], src[n], src[n + 1], src[n + 2 :]


def _results(*arrays: np.ndarray, sums: tuple[ThinSum, ...]) -> Iterator[np.ndarray]:
    """The first sum. The others are added to where they lie."""
    (total, *_), d, u, (x, *_) = _split(arrays)
    of_b, first, column = sums[0]
    if of_b:
        n, rank = total.shape
        yield total + d[:, column : column + n].T @ u[:, first : first + rank]
    else:
        yield total + d[:, first : first + len(total)].T @ x


def _bind(site: CudaSite) -> Call:
    totals, d, u, xs = _split(site.node.src)
    outs, of_d, of_u, arrays = _split(site.src)
    wides, rights, firsts, forms = [], [], [], []
    for total, x, array, s in zip(totals, xs, arrays, site.node.params["sums"], strict=True):
        k, rank = total.shape if s.of_b else total.shape[::-1]
        wides.append(of_d if s.of_b else array)
        rights.append(of_u if s.of_b else of_d)
        firsts.append((s.column if s.of_b else 0, s.first))
        steps = (d.shape[1], u.shape[1]) if s.of_b else (x.shape[1], d.shape[1])
        forms.append((k, rank, *steps, *((rank, 1) if s.of_b else (1, k))))
    n_tiles = max(columns(rank) for _, rank, *_ in forms) // TILE_COLUMNS
    grid = -(-max(k for k, *_ in forms) // COLUMNS), len(forms)
    return launch(
        _kernel(n_tiles), grid, 32 * _WARPS, site.stream, tuple(outs), tuple(wides), tuple(rights),
        tuple(firsts), tuple(forms), d.shape[0], writes=outs,
    )  # fmt: skip


@cache
def _op(n: int) -> OwnOp:
    return OwnOp(
        name="thin_gradients_add", spec=lambda *src, sums: Spec(src[0].shape),
        saved=lambda *src, sums: (), results=_results, samples=lambda rng: iter(()),
        refuses={"sums": ()}, kernel=CudaKernel(_bind), memory=Memory.INPLACE_FIRST,
        changes=tuple(range(n)), costly=True,
    )  # fmt: skip


def _gradient_of(r: Tensor) -> Tensor | None:
    """The D of a gradient of a thin factor that is added to a leaf, if the kernel takes it."""
    of_b = is_of(r, "gradient_of_b_add")
    if not (of_b or is_of(r, "gradient_of_a_add")) or not r.is_write or r.src[0].op is not None:
        return None
    d, x = (r.src[2], r.src[2]) if of_b else (r.src[1], r.src[-1])
    plain = x.dtype is BF16 and x.is_contiguous and len(r.src) == 3 and d.shape[0] < MANY_ROWS
    return d if plain and min(r.shape) <= _MOST_RANK else None


@graph_pass
def with_thin_sums(graph: Graph) -> Graph:
    """The graph with one node for the gradients of thin factors that read the same D, where rows
    are few; the same graph if there are none."""
    groups: dict[Tensor, list[Tensor]] = defaultdict(list)
    for r in graph.nodes:
        if (d := _gradient_of(r)) is not None:
            groups[d].append(r)
    new: dict[Tensor, Tensor] = {}
    for d, group in groups.items():
        new |= _join(group, d)
    return rewrite(graph, new)


def _join(group: list[Tensor], d: Tensor) -> Replacements:
    us = {r.src[1] for r in group if is_of(r, "gradient_of_b_add")}
    if len(group) < 2 or len(us) != 1 or not ptx.TENSOR_CORES:
        return {}
    sums, xs = [], []
    for r in group:
        of_b = is_of(r, "gradient_of_b_add")
        sums.append(ThinSum(of_b, r.params["first"], r.params.get("column", 0)))
        xs.append(d if of_b else r.src[2])
    totals = [r.src[0] for r in group]
    node = over_first(_op(len(group))(*totals, d, *us, *xs, sums=tuple(sums)))
    return {r: node if r is group[0] else after(r.src[0], node) for r in group}
