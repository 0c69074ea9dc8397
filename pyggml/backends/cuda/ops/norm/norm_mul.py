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
from pyggml.backends.cuda.code.fours import lies_in_fours
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.ops.layout.copies import conversion
from pyggml.backends.cuda.ops.norm.by_row import holds_rows, rows_call, rows_of_sums
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite, is_of
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_element, per_rows
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.expression import Expression, symbol
from pyggml.formulas.formula import Formula, formula
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor
from pyggml.ops import formulas
from pyggml.ops.norm.norm_mul import (
    RMS_NORM_MUL,
    RMS_NORM_MUL_BACK,
    rms_norm_mul_back,
    rms_norm_mul_back_w,
)

assert RMS_NORM_MUL.formula is not None and RMS_NORM_MUL_BACK.formula is not None
_NORM, _BACK = RMS_NORM_MUL.formula, RMS_NORM_MUL_BACK.formula


def _weight_back(x: Expression, dy: Expression, *, eps: Expression) -> Expression:
    """What a number adds to the gradient of its column's weight."""
    return formulas.rms_norm(x, eps=eps) * dy


_BACK_W = formula(_weight_back)
BACK_AND_W = replace(_BACK, name="norm_backs", results=(_BACK.result, _BACK_W.result))

# -- the gradient of the weight -----------------------------------------------------------------

_CHUNK_ROWS = 16  # rows whose part of dw one block, or warp, adds up: one row after the other
_CHUNK_SUMS = 32  # such sums that one thread adds up


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


def bind_sums(out: Any, scratch: Any, n_rows: int, stream: Any) -> tuple[Any, list[Call]]:
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


def _in_fours(node: Tensor) -> bool:
    return holds_rows(node) and lies_in_fours(*node.src)


def _back_w_scratch(node: Tensor, compute: str) -> int:
    n_rows, n_chunks = _rows_and_chunks(node)
    if _in_fours(node):
        return bytes_of_sums(rows_of_sums(n_rows, node.shape[-1]), node.shape[-1])
    return F32.block_bytes * n_rows + bytes_of_sums(n_chunks, node.shape[-1])


def _back_w(site: CudaSite) -> Call:
    (n_rows, n_chunks), n = _rows_and_chunks(site.node), site.node.shape[-1]
    numbers = site.scratch.view(np.float32)
    if _in_fours(site.node):
        sums, calls = bind_sums(site.out, numbers, rows_of_sums(n_rows, n), site.stream)
        return in_turn(rows_call(_BACK_W, site, n, [sums], site.src, n_totals=1), *calls)
    x, dy = site.src
    of_x, of_dy = (conversion(s.dtype, F32) for s in site.node.src)
    rates = numbers[:n_rows]
    sums, calls = bind_sums(site.out, numbers[n_rows:], n_chunks, site.stream)
    return in_turn(
        per_rows(_rates(of_x), n_rows, n, site.stream, rates, x, n, *site.scalars),
        per_rows(_weighted_sums(of_x, of_dy), n_chunks, n, site.stream, sums, x, dy, rates, n),
        *calls,
    )


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


def _again_and_adds_last(m: Match, compute: Compute) -> bool:
    return m.norm.params == m.back.params and _adds_last(m, compute)


def _bind_back_add(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    """Of a norm that is computed again, its result too."""
    *norms, back, add = sites
    of, outs = _and_sum(is_read[-2]), [back.out, add.out] if is_read[-2] else [add.out]
    if norms:
        outs = [norms[0].out, *outs]
        of = replace(of, name="norm_and_back_add", results=(_NORM.result, *of.results))
    return rows_call(of, back, back.node.shape[-1], outs, [*back.src, add.src[0]])


@cache
def _and_sum(writes_dx: bool) -> Formula:
    """dx, if it is written, and y + dx."""
    total = symbol("y") + _BACK.result
    results = (_BACK.result, total) if writes_dx else (total,)
    return replace(_BACK, name="norm_back_add", sources=(*_BACK.sources, "y"), results=results)


def _with_weight(m: Match, compute: Compute) -> bool:
    total = m.get("total")
    is_last = total is None or _adds_last(m, compute)
    return is_last and holds_rows(m.back) and lies_in_fours(m.x, m.w, m.dy)


def _bind_backs(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    """The gradients of a norm by x and by its weight, and the sum of the first and another one."""
    back, *adds, of_weight = sites
    sums, calls = bind_sums_in_scratch(of_weight, back.node)
    of, outs, sources = BACK_AND_W, [back.out], back.src
    if adds:
        of, sources = _and_sum(is_read[0]), (*sources, adds[0].src[0])
        of = replace(of, name="norm_backs_add", results=(*of.results, _BACK_W.result))
        outs = [back.out, adds[0].out] if is_read[0] else [adds[0].out]
    n = back.node.shape[-1]
    return in_turn(rows_call(of, back, n, [*outs, sums], sources, n_totals=1), *calls)


def bind_sums_in_scratch(of_weight: CudaSite, back: Tensor) -> tuple[Any, list[Call]]:
    """The rows of sums of a fused kernel, in scratch, and the calls that add them up."""
    n_rows = rows_of_sums(back.n_elements // back.shape[-1], back.shape[-1])
    return bind_sums(of_weight.out, of_weight.scratch.view(np.float32), n_rows, of_weight.stream)


def scratch_of_backs(node: Tensor, compute: Compute) -> int:
    """Of a fused node, for `bind_sums_in_scratch`."""
    (n,) = next(t.shape for t in node.params["of"].nodes if is_of(t, "rms_norm_mul_back_w"))
    return bytes_of_sums(rows_of_sums(node.n_elements // n, n), n)


def _sum_and_norm(rng: np.random.Generator) -> Graph:
    x = ops.add(drawn(rng, 6, 40), drawn(rng, 6, 40))
    return Graph.of(ops.rms_norm_mul(x, drawn(rng, 40), eps=1e-3), ops.scale(x, 2.0))


def _sum_copy_and_norm(rng: np.random.Generator) -> Graph:
    x = ops.add(drawn(rng, 6, 40), drawn(rng, 6, 40))
    return Graph.of(ops.cpy(x, BF16), ops.rms_norm_mul(x, drawn(rng, 40), eps=1e-3))


def _gradients(rng: np.random.Generator) -> Graph:
    x, dy = drawn(rng, 70, 40), drawn(rng, 70, 40)
    dx = rms_norm_mul_back(x, drawn(rng, 40), dy, eps=1e-3)
    return Graph.of(dx, rms_norm_mul_back_w(x, dy, eps=1e-3))


def _gradients_and_sum(rng: np.random.Generator) -> Graph:
    x, dy = drawn(rng, 70, 40), drawn(rng, 70, 40)
    dx = rms_norm_mul_back(x, drawn(rng, 40), dy, eps=1e-3)
    return Graph.of(ops.add(drawn(rng, 70, 40), dx), rms_norm_mul_back_w(x, dy, eps=1e-3))


def _gradient_and_sum(rng: np.random.Generator) -> Graph:
    dx = rms_norm_mul_back(drawn(rng, 6, 40), drawn(rng, 40), drawn(rng, 6, 40), eps=1e-3)
    return Graph.of(ops.add(drawn(rng, 6, 40), dx))


def _norm_gradient_and_sum(rng: np.random.Generator) -> Graph:
    x, w = drawn(rng, 6, 40), drawn(rng, 40)
    dx = rms_norm_mul_back(x, w, drawn(rng, 6, 40), eps=1e-3)
    return Graph.of(ops.rms_norm_mul(x, w, eps=1e-3), ops.add(drawn(rng, 6, 40), dx))


declare("rms_norm_mul_back_w", _back_w, scratch=_back_w_scratch)
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
NORM_BACKS_ADD = Fusion(
    near("""
        back = rms_norm_mul_back(x, w, dy)
        total = add(a, back)
        dw = rms_norm_mul_back_w(x, dy)
    """),
    _with_weight, _bind_backs, _gradients_and_sum, Memory.INPLACE, scratch=scratch_of_backs,
)  # fmt: skip
NORM_BACKS = Fusion(
    near("back = rms_norm_mul_back(x, w, dy); dw = rms_norm_mul_back_w(x, dy)"),
    _with_weight, _bind_backs, _gradients, Memory.INPLACE, scratch=scratch_of_backs,
)  # fmt: skip
NORM_AGAIN_BACK_ADD = Fusion(
    near("""
        norm = rms_norm_mul(x, w)
        back = rms_norm_mul_back(x, w, dy)
        total = add(a, back)
    """),
    _again_and_adds_last, _bind_back_add, _norm_gradient_and_sum, Memory.INPLACE,
)  # fmt: skip
NORM_BACK_ADD = Fusion(
    near("back = rms_norm_mul_back(x, w, dy); total = add(a, back)"),
    _adds_last, _bind_back_add, _gradient_and_sum, Memory.INPLACE,
)  # fmt: skip
