"""The gradient of the weight of an RMS norm, and fusions: a residual sum before such a norm, or
after its gradient, in the same kernel. See ops/norm/norm_mul.py.

The x of a norm, its result and its gradients may be BF16 where rows are held; so may a copy of the
residual sum, for the backward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.fours import lies_in_fours, loader
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.ops.layout.copies import conversion
from pyggml.backends.cuda.ops.norm.by_row import holds_rows, rows_call
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, launch, per_element, per_rows
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.expression import symbol
from pyggml.formulas.formula import Formula
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor
from pyggml.ops.norm.norm_mul import RMS_NORM_MUL, RMS_NORM_MUL_BACK, rms_norm_mul_back

assert RMS_NORM_MUL.formula is not None and RMS_NORM_MUL_BACK.formula is not None
_NORM, _BACK = RMS_NORM_MUL.formula, RMS_NORM_MUL_BACK.formula

# -- the gradient of the weight -----------------------------------------------------------------

_CHUNK_ROWS = 16  # rows whose part of dw one block, or warp, adds up: one row after the other
_CHUNK_SUMS = 64  # such sums that one thread adds up
_BLOCK, _MOST_FOURS = small(THREADS, 4), 8  # threads that share a row, and what each has of it
_MOST_BLOCKS = 1056  # each of which has sums of its own


@cache
def _rates(of_x: Any) -> Any:
    """of_x: what makes a float of a number of x."""

    @kernel
    def rates_of_rows(rates, x, n, eps):
        parts = cuda.shared.array(THREADS, np.float32)
        for row in range(first_row(), rates.size, rows_apart()):
            squares = ZERO
            for i in range(row * n + cuda.threadIdx.x, (row + 1) * n, cuda.blockDim.x):
                squares += of_x(x[i]) * of_x(x[i])
            r = ONE / math.sqrt(block_sum(squares, parts) / np.float32(n) + eps)
            if cuda.threadIdx.x == 0:
                rates[row] = r

    return rates_of_rows


@cache
def _weighted_sums(of_x: Any, of_dy: Any) -> Any:
    @kernel
    def weighted_sums(sums, x, dy, rates, n):
        """sums (n_chunks, n): of each chunk of rows, Σ r·x·dy."""
        for chunk in range(first_row(), sums.size // n, rows_apart()):
            first, last = chunk * _CHUNK_ROWS, min((chunk + 1) * _CHUNK_ROWS, rates.size)
            for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
                total = ZERO
                for row in range(first, last):
                    total += rates[row] * of_x(x[row * n + j]) * of_dy(dy[row * n + j])
                sums[chunk * n + j] = total

    return weighted_sums


@cache
def _sums_of_fours(x_in_bf16: bool, dy_in_bf16: bool, fours: int) -> Any:
    load_x, load_dy, of_fours = loader(x_in_bf16), loader(dy_in_bf16), (fours, 4)

    @kernel
    def sums_of_fours(sums, x, dy, n, eps):
        """sums (blocks, n): of a block's rows, Σ r·x·dy, where a thread has some fours of each."""
        parts = cuda.shared.array(THREADS, np.float32)
        here = cuda.local.array(of_fours, np.float32)
        totals = cuda.local.array(of_fours, np.float32)
        for i in range(fours):
            for e in range(4):
                totals[i, e] = ZERO
        for row in range(cuda.blockIdx.x, x.size // n, cuda.gridDim.x):
            squares = ZERO
            for i in range(fours):
                j = 4 * (cuda.threadIdx.x + i * cuda.blockDim.x)
                at = row * n + min(j, n - 4)
                p, q = load_x(x, at), load_dy(dy, at)
                here[i, 0], here[i, 1] = p[0] * q[0], p[1] * q[1]
                here[i, 2], here[i, 3] = p[2] * q[2], p[3] * q[3]
                if j < n:
                    squares += p[0] * p[0] + p[1] * p[1] + p[2] * p[2] + p[3] * p[3]
            r = ONE / math.sqrt(block_sum(squares, parts) / np.float32(n) + eps)
            for i in range(fours):
                for e in range(4):
                    totals[i, e] += r * here[i, e]
        for i in range(fours):
            j = 4 * (cuda.threadIdx.x + i * cuda.blockDim.x)
            if j < n:
                for e in range(4):
                    sums[cuda.blockIdx.x * n + j + e] = totals[i, e]

    return sums_of_fours


@kernel
def _sum_chunks(out, sums, n):
    """Rows of out: sums over as many rows of `sums` as a chunk has; the last of them over fewer."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        first, total = i // n * _CHUNK_SUMS * n + i % n, ZERO
        for at in range(first, min(first + _CHUNK_SUMS * n, sums.size), n):
            total += sums[at]
        out[i] = total


def _levels(n_rows: int) -> list[int]:
    """Rows of sums, chunks of them, chunks of these, until one is left."""
    sizes = [n_rows]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // _CHUNK_SUMS))
    return sizes


def bytes_of_sums(n_rows: int, n: int) -> int:
    """Of so many rows of n sums, and of those that they are added up to, but the last row."""
    return F32.block_bytes * n * sum(_levels(n_rows)[:-1])


def summed(out: Any, scratch: Any, n_rows: int, stream: Any) -> tuple[Any, list[Call]]:
    """The rows of sums to be written, and the calls that add them up in `out` (n,), in an order
    that is always the same. scratch: `bytes_of_sums`, as float32; one row is `out` itself"""
    levels, n = [], out.size
    for size in _levels(n_rows)[:-1]:
        levels.append(scratch[: size * n])
        scratch = scratch[size * n :]
    levels.append(out)
    calls = (per_element(_sum_chunks, b.size, stream, b, a, n) for a, b in pairwise(levels))
    return levels[0], list(calls)


def _rows_and_chunks(node: Tensor) -> tuple[int, int]:
    x = node.src[0]
    n_rows = x.n_elements // x.shape[-1]
    return n_rows, max(-(-n_rows // _CHUNK_ROWS), 1)


def _fours_of_a_thread(node: Tensor) -> int:
    """Of a row; 0 if it is not read in fours."""
    n = node.shape[-1]
    fours = -(-n // (4 * _BLOCK))
    return fours if n % 4 == 0 and lies_in_fours(*node.src) and fours <= _MOST_FOURS else 0


def _n_blocks(node: Tensor) -> int:
    return max(1, min(_rows_and_chunks(node)[0], _MOST_BLOCKS))


def _back_w_scratch(node: Tensor, compute: str) -> int:
    if _fours_of_a_thread(node):
        return bytes_of_sums(_n_blocks(node), node.shape[-1])
    n_rows, n_chunks = _rows_and_chunks(node)
    return F32.block_bytes * n_rows + bytes_of_sums(n_chunks, node.shape[-1])


def _back_w(site: CudaSite) -> Call:
    if fours := _fours_of_a_thread(site.node):
        return _back_w_of_fours(site, fours)
    x, dy = site.src
    of_x, of_dy = (conversion(s.dtype, F32) for s in site.node.src)
    (n_rows, n_chunks), n = _rows_and_chunks(site.node), site.node.shape[-1]
    numbers = site.scratch.view(np.float32)
    rates = numbers[:n_rows]
    sums, calls = summed(site.out, numbers[n_rows:], n_chunks, site.stream)
    return in_turn(
        per_rows(_rates(of_x), n_rows, n, site.stream, rates, x, n, *site.scalars),
        per_rows(_weighted_sums(of_x, of_dy), n_chunks, n, site.stream, sums, x, dy, rates, n),
        *calls,
    )


def _back_w_of_fours(site: CudaSite, fours: int) -> Call:
    n, n_blocks = site.node.shape[-1], _n_blocks(site.node)
    sums, calls = summed(site.out, site.scratch.view(np.float32), n_blocks, site.stream)
    run = _sums_of_fours(*(s.dtype is BF16 for s in site.node.src), fours)
    first = launch(run, n_blocks, _BLOCK, site.stream, sums, *site.src, n, *site.scalars)
    return in_turn(first, *calls)


# -- fusions ------------------------------------------------------------------------------------


def _is_residual(t: Tensor) -> bool:
    return t.src[0].shape == t.src[1].shape == t.shape


def _adds_first(m: Match, compute: Compute) -> bool:
    """norm(a + b)·w, and, of three nodes, a + b in BF16."""
    copy = m.get("copy")
    of_row = m.w.n_elements == m.norm.shape[-1] and (copy is None or copy.dtype is BF16)
    return of_row and holds_rows(m.norm) and lies_in_fours(m.a, m.b, m.w) and _is_residual(m.total)


def _bind_add_norm(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    """Of x = a + b: norm(x)·w, and x itself, in one type or in both, where others read it."""
    add, *copies, norm = sites
    (a, b), w = add.src, norm.src[1]
    sums = [s.out for s, reads in zip((add, *copies), is_read, strict=False) if reads]
    outs, loads = [norm.out, *sums], (("x", ("a", "b")),)
    return rows_call(_norm_and(len(sums)), norm, norm.node.shape[-1], outs, [a, b, w], loads)


@cache
def _norm_and(n: int) -> Formula:
    """The norm, and n times its x."""
    return replace(_NORM, name="add_norm", results=(_NORM.result, *(symbol("x"),) * n))


def _adds_last(m: Match, compute: Compute) -> bool:
    """a + the norm's gradient"""
    is_sum = _is_residual(m.total) and m.back.dtype is F32
    return is_sum and holds_rows(m.back) and lies_in_fours(m.x, m.w, m.dy, m.a)


def _bind_back_add(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    back, add = sites
    of, outs = _and_sum(is_read[0]), [back.out, add.out] if is_read[0] else [add.out]
    return rows_call(of, back, back.node.shape[-1], outs, [*back.src, add.src[0]])


@cache
def _and_sum(writes_dx: bool) -> Formula:
    """dx, if it is written, and y + dx."""
    total = symbol("y") + _BACK.result
    results = (_BACK.result, total) if writes_dx else (total,)
    return replace(_BACK, name="norm_back_add", sources=(*_BACK.sources, "y"), results=results)


def _sum_and_norm(rng: np.random.Generator) -> Graph:
    x = ops.add(drawn(rng, 6, 40), drawn(rng, 6, 40))
    return Graph.of(ops.rms_norm_mul(x, drawn(rng, 40), eps=1e-3), ops.scale(x, 2.0))


def _sum_copy_and_norm(rng: np.random.Generator) -> Graph:
    x = ops.add(drawn(rng, 6, 40), drawn(rng, 6, 40))
    return Graph.of(ops.cpy(x, BF16), ops.rms_norm_mul(x, drawn(rng, 40), eps=1e-3))


def _gradient_and_sum(rng: np.random.Generator) -> Graph:
    dx = rms_norm_mul_back(drawn(rng, 6, 40), drawn(rng, 40), drawn(rng, 6, 40), eps=1e-3)
    return Graph.of(ops.add(drawn(rng, 6, 40), dx))


declare("rms_norm_mul_back_w", CudaKernel(_back_w, scratch=_back_w_scratch))
ADD_NORM = Fusion(
    near("total = add(a, b); norm = rms_norm_mul(total, w)"),
    _adds_first, _bind_add_norm, _sum_and_norm, Memory.INPLACE,
)  # fmt: skip
ADD_COPY_NORM = Fusion(
    near("""
        total = add(a, b)
        copy = cpy(total)
        norm = rms_norm_mul(total, w)
    """),
    _adds_first, _bind_add_norm, _sum_copy_and_norm, Memory.INPLACE,
)  # fmt: skip
NORM_BACK_ADD = Fusion(
    near("back = rms_norm_mul_back(x, w, dy); total = add(a, back)"),
    _adds_last, _bind_back_add, _gradient_and_sum, Memory.INPLACE,
)  # fmt: skip
