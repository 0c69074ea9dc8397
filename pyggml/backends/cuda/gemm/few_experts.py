"""Products with one weight per expert, of few rows: packed weights and x in digits, in one launch.

    y[r] = x[r] · w[e]ᵀ        y[r] = silu(x[r] · gate[e]ᵀ) · (x[r] · up[e]ᵀ) · weights[r]

e = ids[r]. The blocks of a row are a column of the grid. They find its expert, share the rows of
its matrix, and round x by themselves (packed_dots.py). As ids come from a launch before, weights
are not fetched before that has ended; but where another launch with these ids makes x, as for the
last product of experts, they are fetched while that runs. A row of an id that is no expert is 0;
the fault is noted.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.formulas import ZERO, silu
from pyggml.backends.cuda.code.fours import vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.gemm import digits
from pyggml.backends.cuda.gemm.few_rows import (
    MOST_WARPS,
    FewRowsProduct,
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


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A result (rows, n) of x (rows / rows_of_x, k) and w (n_experts, n, k), by ids (rows,).

    up, weights: of a gated product, the second matrix and what multiplies each row (None: 1)
    fault: the cell and the number of a fault, of an id that is no expert
    knows_ids: whether the launch that makes x awaits that which makes the ids
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
    knows_ids: bool = False


def takes(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether there are such products with experts of this type and shape (n_experts, n, k)."""
    _, n, k = shape
    return serves(dtype, 1, k) and n * (k // dtype.block) * dtype.block_bytes % 16 == 0


def expert_products(p: ExpertProduct, stream: Any) -> Call:
    """The launch, for what `takes` allows."""
    n_experts, n, k = p.shape
    n_rows = p.ids.size
    part = FewRowsProduct(p.out, p.w, p.dtype, n, up=p.up)
    vectorized = k % 4 == 0 and vectorizable(p.x)
    of = plan([part], [max(1, _BLOCKS // n_rows)], 1, k, vectorized)
    (kind,), (n_blocks,), (cut,) = of.kinds, of.blocks, of.cuts
    w, up = p.w.view(np.uint8), (p.w if p.up is None else p.up).view(np.uint8)
    weights = p.x if p.weights is None else p.weights
    sizes = n_experts, n, k, p.rows_of_x, w.size // n_experts
    run = _kernel(kind, p.weights is not None, p.knows_ids)
    return launch(
        run, (n_blocks, n_rows), 32 * of.n_warps, stream,
        p.out, p.x, p.ids, w, up, weights, sizes, cut, of.layout, *p.fault, shared_bytes=of.n_bytes,
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
def _kernel(kind: DotShape, is_weighted: bool, knows_ids: bool) -> Any:
    begin, add, finish = beginner(kind), adder(kind), _finisher(kind, is_weighted)
    n_groups, vectorized = kind.unit.n_groups, kind.vectorized
    round_x = digits.rounder(1, n_groups, False, vectorized, kind.has_halves)

    def multiply(y, x, ids, w, up, weights, sizes, cut, layout, fault, number):
        n_experts, n, k, rows_of_x, of_expert = sizes
        memory = cuda.shared.array(0, np.uint32)
        floats = cuda.shared.array(0, np.float32)
        row = np.int64(cuda.blockIdx.y)
        first, n_rows = rows_of(cut, np.int64(cuda.blockIdx.x))
        if knows_ids:
            cuda.threadfence()  # they are read early, and may be others than they were
        else:
            await_others()
        expert = np.int64(ids[np.uint64(row)])
        is_expert = 0 <= expert < n_experts
        start, of_x = expert * of_expert if is_expert else 0, row // rows_of_x * k
        own, own_up = w[start : start + of_expert], up[start : start + of_expert]
        part = (y, y, own, own_up, n, cut, False)
        begin(memory, part, layout, first, n_rows)
        if knows_ids:
            await_others()
        round_x(memory, floats, x[of_x : of_x + k], k, layout.a, (x, ZERO, x, False))
        cuda.syncthreads()
        release_others()
        if not is_expert:
            _leave_empty(y, row, n, fault, number)
            return
        add(memory, floats, part, layout, first, n_rows)
        cuda.syncthreads()
        factor = weights[np.uint64(row)] if is_weighted else ZERO
        finish(floats, y, row * n + first, factor, cut, layout, min(n_rows, n - first))

    run = kernel(multiply, most_threads=32 * MOST_WARPS, shared_bytes=shared_bytes())
    return begins_early(run, lambda arguments: arguments[2:5] if knows_ids else [])
