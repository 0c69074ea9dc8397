"""Products with one weight per expert, of few rows: packed weights and x in digits, in one launch.

    y[r] = x[r] · w[e]ᵀ        y[r] = silu(x[r] · gate[e]ᵀ) · (x[r] · up[e]ᵀ) · weights[r]
    z[t] = added[t] + Σ over the rows r of token t of y[r]

e = ids[r]. The blocks of a row are a column of the grid. They find its expert, share the rows of
its matrix, and round x by themselves (packed_dots.py). As ids come from a launch before, weights
are not fetched before that has ended. A row of an id that is no expert is 0; the fault is noted.

Where results are summed, the blocks of a token's experts are a cluster. Each sends its numbers to
the block that adds them up. The ids are known to the launch before already, which makes x: so
weights are fetched while that runs.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.cluster import MOST_BLOCKS, has_clusters
from pyggml.backends.cuda.code import cluster_ptx
from pyggml.backends.cuda.code.formulas import ZERO, silu
from pyggml.backends.cuda.code.fours import vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.gemm import digits
from pyggml.backends.cuda.gemm.few_rows import (
    MOST_WARPS,
    RowProduct,
    plan,
    serves,
    shared_bytes,
)
from pyggml.backends.cuda.gemm.packed_dots import DotShape, adder, beginner, row_sum, rows_of
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import await_others, begins_early, release_others
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DType

_BLOCKS = 132  # one for each multiprocessor of a large card
_MOST_SUMS, _FEWEST_BLOCKS = 1024, 8  # rows of a block, and blocks of an expert, where it sums


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A result (rows, n) of x (rows / rows_of_x, k) and w (n_experts, n, k), by ids (rows,).

    up, weights: of a gated product, the second matrix and what multiplies each row (None: 1)
    n_used, added: of a sum, the rows of a token, and what is added to it; n_used is 0 of none
    fault: the cell and the number of a fault, of an id that is no expert
    """

    out: Any
    x: Any
    ids: Any
    rows_of_x: int
    w: Any
    dtype: DType
    shape: tuple[int, int, int]
    fault: tuple[Any, np.int32]
    up: Any = None
    weights: Any = None
    n_used: int = 0
    added: Any = None


def takes(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether there are such products with experts of this type and shape (n_experts, n, k)."""
    _, n, k = shape
    return serves(dtype, 1, k) and n * (k // dtype.block) * dtype.block_bytes % 16 == 0


def sums(shape: tuple[int, ...], n_used: int) -> bool:
    """Whether a launch can add up the results of a token's n_used experts of this shape."""
    return has_clusters() and n_used <= MOST_BLOCKS and shape[1] <= _MOST_SUMS * _FEWEST_BLOCKS


def expert_products(p: ExpertProduct, stream: Any) -> Call:
    """The launch, for what `takes` allows, and `sums` where n_used is not 0."""
    n_experts, n, k = p.shape
    n_rows = p.ids.size
    part = RowProduct(p.out, p.w, p.dtype, n, up=p.up)
    vectorized = k % 4 == 0 and vectorizable(p.x)
    fewest = _FEWEST_BLOCKS if p.n_used else 1
    of = plan([part], [max(fewest, _BLOCKS // n_rows)], 1, k, vectorized)
    (kind,), (n_blocks,), (cut,) = of.kinds, of.blocks, of.cuts
    w, up = p.w.view(np.uint8), (p.w if p.up is None else p.up).view(np.uint8)
    sizes = n_experts, n, k, p.rows_of_x, w.size // n_experts
    if p.n_used:
        run, more = _summing_kernel(kind, p.n_used), [p.added]
        grid: tuple[int, ...] = (p.n_used, n_blocks, n_rows // p.n_used)
    else:
        run, grid = _kernel(kind, p.weights is not None), (n_blocks, n_rows)
        more = [up, p.x if p.weights is None else p.weights]
    return launch(
        run, grid, 32 * of.n_warps, stream, p.out, p.x, p.ids, w, *more, sizes, cut, of.layout,
        *p.fault, shared_bytes=of.n_bytes,
    )  # fmt: skip


@cache
def _finisher(kind: DotShape, is_weighted: bool) -> Any:
    units, is_gated = kind.units, kind.is_gated

    @device
    def finish(floats, y, start, factor, cut, layout, n_rows):
        """Write a block's rows of a result, which begin at `start`."""
        row = np.int64(cuda.threadIdx.x)
        while row < n_rows:
            place = (layout.sums >> 2) + row * units
            total = row_sum(floats, place, units)
            if is_gated:
                total = silu(total) * row_sum(floats, place + cut.most, units)
            if is_weighted:
                total *= factor
            y[np.uint64(start + row)] = total
            row += cuda.blockDim.x

    return finish


@device
def _leave_empty(y, row, n, fault, number):
    """0 in a row of no expert, by its first block."""
    if cuda.blockIdx.x == 0:
        i = np.int64(cuda.threadIdx.x)
        while i < n:
            y[np.uint64(row * n + i)] = ZERO
            i += cuda.blockDim.x
        if cuda.threadIdx.x == 0:
            cuda.atomic.max(fault, 0, number)


@cache
def _kernel(kind: DotShape, is_weighted: bool) -> Any:
    begin, add, finish = beginner(kind), adder(kind), _finisher(kind, is_weighted)
    n_groups, vectorized = kind.unit.n_groups, kind.vectorized
    round_x = digits.rounder(1, n_groups, False, vectorized, kind.has_halves)

    def multiply(y, x, ids, w, up, weights, sizes, cut, layout, fault, number):
        n_experts, n, k, rows_of_x, of_expert = sizes
        memory = cuda.shared.array(0, np.uint32)
        floats = cuda.shared.array(0, np.float32)
        row = np.int64(cuda.blockIdx.y)
        first, n_rows = rows_of(cut, np.int64(cuda.blockIdx.x))
        await_others()
        expert = np.int64(ids[np.uint64(row)])
        if not 0 <= expert < n_experts:
            release_others()
            _leave_empty(y, row, n, fault, number)
            return
        start, of_x = expert * of_expert, row // rows_of_x * k
        own, own_up = w[start : start + of_expert], up[start : start + of_expert]
        part = (y, y, own, own_up, n, cut, False)
        begin(memory, part, layout, first, n_rows)
        round_x(memory, floats, x[of_x : of_x + k], k, layout.a, (x, ZERO, x, False))
        cuda.syncthreads()
        release_others()
        add(memory, floats, part, layout, first, n_rows)
        cuda.syncthreads()
        factor = weights[np.uint64(row)] if is_weighted else ZERO
        finish(floats, y, row * n + first, factor, cut, layout, min(n_rows, n - first))

    made = kernel(multiply, most_threads=32 * MOST_WARPS, shared_bytes=shared_bytes())
    return begins_early(made, lambda arguments: [])


@cache
def _summing_kernel(kind: DotShape, n_used: int) -> Any:
    begin, add, units = beginner(kind), adder(kind), kind.units
    round_x = digits.rounder(1, kind.unit.n_groups, False, kind.vectorized, kind.has_halves)
    place, of_numbers = cluster_ptx.clusters_of(n_used), (n_used, -(-_MOST_SUMS // n_used))

    def multiply(z, x, ids, w, added, sizes, cut, layout, fault, number):
        place()
        n_experts, n, k, _, of_expert = sizes
        barrier = cuda.shared.array(1, np.uint64)
        numbers = cuda.shared.array(of_numbers, np.float32)
        memory = cuda.shared.array(0, np.uint32)
        floats = cuda.shared.array(0, np.float32)
        token, used = np.int64(cuda.blockIdx.z), np.int64(cuda.blockIdx.x)
        row, thread = token * n_used + used, np.int64(cuda.threadIdx.x)
        first, n_rows = rows_of(cut, np.int64(cuda.blockIdx.y))
        n_own = min(n_rows, n - first)
        if thread == 0:
            n_mine = (n_own - used + n_used - 1) // n_used
            cluster_ptx.expect_bytes(barrier, np.uint32(4 * n_used * n_mine))
        cluster_ptx.arrive_in_cluster()
        cuda.threadfence()  # the ids are read early, and may be others than they were
        expert = np.int64(ids[np.uint64(row)])
        is_expert = 0 <= expert < n_experts
        start = expert * of_expert if is_expert else 0
        part = (z, z, w[start : start + of_expert], w, n, cut, False)
        begin(memory, part, layout, first, n_rows)
        await_others()
        round_x(memory, floats, x[row * k : row * k + k], k, layout.a, (x, ZERO, x, False))
        mine, of_z, held = thread * n_used + used, token * n + first, ZERO
        if mine < n_own:
            held = added[np.uint64(of_z + mine)]
        cuda.syncthreads()
        release_others()
        add(memory, floats, part, layout, first, n_rows)
        cuda.syncthreads()
        cluster_ptx.await_cluster()  # until then another block may not have begun
        i = thread
        while i < n_own:
            total = row_sum(floats, (layout.sums >> 2) + i * units, units) if is_expert else ZERO
            to = 4 * (used * of_numbers[1] + i // n_used)
            cluster_ptx.send(numbers, to, barrier, np.uint32(i % n_used), total)
            i += cuda.blockDim.x
        if mine < n_own:
            cluster_ptx.await_bytes(barrier)
        while mine < n_own:
            at, total = np.uint64(of_z + mine), ZERO
            for j in range(n_used):
                total += numbers[j, mine // n_used]
            z[at] = (held if mine < cuda.blockDim.x * n_used else added[at]) + total
            mine += cuda.blockDim.x * n_used
        if thread == 0 and not is_expert:
            cuda.atomic.max(fault, 0, number)

    made = kernel(multiply, most_threads=32 * MOST_WARPS, shared_bytes=shared_bytes())
    return begins_early(made, lambda arguments: arguments[2:4])
