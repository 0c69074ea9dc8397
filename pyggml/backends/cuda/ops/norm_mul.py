"""RMS norm times a weight: see ops/norm/norm_mul.py. Also a residual sum before it, or after its
gradient, in the same kernel.

A row is read once: its threads hold it in registers, in fours. Rows too long for that, or that do
not begin where fours can be moved, are read twice. The x of a norm, its result and its gradients
may be BF16 where rows are held; so may a copy of the residual sum, for the backward pass.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.fours import (
    lies_in_fours,
    load_four,
    loader,
    put_four_bf16,
    store_four,
    storer,
    vectorizable,
)
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.norm import squares
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import (
    THREADS,
    in_turn,
    per_element,
    per_rows,
    threads_of_row,
)
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import Memory
from pyggml.graph.tensor import Tensor
from pyggml.ops.norm.norm_mul import rms_norm_mul_back

_MOST_FOURS = 8  # of a thread: 32 numbers of each source in registers
_Types = tuple[bool, ...]  # of some arrays: whether they are BF16

# -- rows that are held -------------------------------------------------------------------------


@cache
def _reader(fours: int, in_bf16: bool = False) -> Any:
    load = loader(in_bf16)

    @device
    def read(held, x, at, n):
        """The thread's fours of the row that begins at `at`, zeros behind its end."""
        for i in range(fours):
            j = 4 * (cuda.threadIdx.x + i * cuda.blockDim.x)
            a, b, c, d = ZERO, ZERO, ZERO, ZERO
            if j < n:
                a, b, c, d = load(x, at + j)
            held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = a, b, c, d

    return read


@cache
def _forward(fours: int, adds: bool, copies: bool, types: _Types) -> Any:
    """out = norm(x)·w; where it adds, of x + y, which `total` becomes if `writes_sum`, and `copy`
    rounded. types: of x and out."""
    read, read_more, size = _reader(fours, types[0]), _reader(fours), 4 * fours
    store = storer(types[1])

    @kernel
    def run(out, x, w, total, y, copy, writes_sum, n, eps):
        parts = cuda.shared.array(THREADS, np.float32)
        held = cuda.local.array(size, np.float32)
        added = cuda.local.array(size, np.float32)
        for row in range(first_row(), x.size // n, rows_apart()):
            at, sum_of_squares = row * n, ZERO
            read(held, x, at, n)
            if adds:
                read_more(added, y, at, n)
                for i in range(size):
                    held[i] += added[i]
            for i in range(size):
                sum_of_squares += held[i] * held[i]
            r = ONE / math.sqrt(block_sum(sum_of_squares, parts) / np.float32(n) + eps)
            for i in range(fours):
                j = 4 * (cuda.threadIdx.x + i * cuda.blockDim.x)
                if j < n:
                    p, q, s, t = held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3]
                    if adds and writes_sum:
                        store_four(total, at + j, p, q, s, t)
                    if copies:
                        put_four_bf16(copy, at + j, p, q, s, t)
                    a, b, c, d = load_four(w, j)
                    store(out, at + j, p * r * a, q * r * b, s * r * c, t * r * d)

    return run


@cache
def _backward(fours: int, adds: bool, types: _Types) -> Any:
    """dx = r·w·dy − r³·mean(x·w·dy)·x; where it adds, total = y + dx, and dx only if `writes_dx`.

    types: of x, dy and dx
    """
    read, read_w, read_dy = _reader(fours, types[0]), _reader(fours), _reader(fours, types[1])
    store, size = storer(types[2]), 4 * fours

    @kernel
    def run(dx, x, w, dy, total, y, writes_dx, n, eps):
        parts = cuda.shared.array(THREADS, np.float32)
        held = cuda.local.array(size, np.float32)
        slope = cuda.local.array(size, np.float32)  # w·dy
        weight = cuda.local.array(size, np.float32)
        for row in range(first_row(), x.size // n, rows_apart()):
            at, sum_of_squares, along = row * n, ZERO, ZERO
            read(held, x, at, n)
            read_dy(slope, dy, at, n)
            read_w(weight, w, 0, n)
            for i in range(size):
                slope[i] *= weight[i]
                sum_of_squares += held[i] * held[i]
                along += held[i] * slope[i]
            r = ONE / math.sqrt(block_sum(sum_of_squares, parts) / np.float32(n) + eps)
            back = r * r * r * block_sum(along, parts) / np.float32(n)
            for i in range(fours):
                j = 4 * (cuda.threadIdx.x + i * cuda.blockDim.x)
                if j < n:
                    p = r * slope[4 * i] - back * held[4 * i]
                    q = r * slope[4 * i + 1] - back * held[4 * i + 1]
                    s = r * slope[4 * i + 2] - back * held[4 * i + 2]
                    t = r * slope[4 * i + 3] - back * held[4 * i + 3]
                    if writes_dx:
                        store(dx, at + j, p, q, s, t)
                    if adds:
                        a, b, c, d = load_four(y, at + j)
                        store_four(total, at + j, a + p, b + q, c + s, d + t)

    return run


def _fours(n: int, *arrays: Any) -> int:
    """How many fours of a row of n a thread holds; 0 if it cannot."""
    needed = -(-n // (4 * threads_of_row(n)))
    fits = n % 4 == 0 and needed <= _MOST_FOURS and vectorizable(*arrays)
    return 1 << (needed - 1).bit_length() if fits else 0


# -- rows that are read twice -------------------------------------------------------------------


@kernel
def _plain(out, x, w, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / math.sqrt(squares(x, at, n, parts) / np.float32(n) + eps)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            out[at + j] = x[at + j] * r * w[j]


@kernel
def _plain_back(dx, x, w, dy, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / math.sqrt(squares(x, at, n, parts) / np.float32(n) + eps)
        total = ZERO
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            total += x[at + j] * w[j] * dy[at + j]
        back = r * r * r * block_sum(total, parts) / np.float32(n)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            dx[at + j] = r * w[j] * dy[at + j] - back * x[at + j]


def holds_rows(node: Tensor) -> bool:
    """Whether the kernel of a norm or its gradient holds rows of this length, and so takes BF16."""
    n = node.shape[-1]
    return n % 4 == 0 and -(-n // (4 * threads_of_row(n))) <= _MOST_FOURS


def _types(*tensors: Tensor) -> _Types:
    return tuple(t.dtype is BF16 for t in tensors)


def _bind(site: CudaSite) -> Call:
    n, (x, _) = site.node.shape[-1], site.node.src
    arrays, n_rows = (site.out, *site.src), site.node.n_elements // n
    fours, types = _fours(n, *arrays), _types(x, site.node)
    if not fours:
        assert not any(types)
        return per_rows(_plain, n_rows, n, site.stream, *arrays, n, *site.scalars)
    unused = (site.out,) * 3
    run = _forward(fours, False, False, types)
    return per_rows(run, n_rows, n, site.stream, *arrays, *unused, False, n, *site.scalars)


def _bind_back(site: CudaSite) -> Call:
    n, (x, _, dy) = site.node.shape[-1], site.node.src
    arrays, n_rows = (site.out, *site.src), site.node.n_elements // n
    fours, types = _fours(n, *arrays), _types(x, dy, site.node)
    if not fours:
        assert not any(types)
        return per_rows(_plain_back, n_rows, n, site.stream, *arrays, n, *site.scalars)
    run, unused = _backward(fours, False, types), (site.out, site.out, True)
    return per_rows(run, n_rows, n, site.stream, *arrays, *unused, n, *site.scalars)


# -- the gradient of the weight -----------------------------------------------------------------

_CHUNK_ROWS = 64  # rows whose part of dw one block adds up


@kernel
def _rates(rates, x, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), rates.size, rows_apart()):
        r = ONE / math.sqrt(squares(x, row * n, n, parts) / np.float32(n) + eps)
        if cuda.threadIdx.x == 0:
            rates[row] = r


@kernel
def _weighted_sums(sums, x, dy, rates, n):
    """sums (n_chunks, n): of each chunk of rows, Σ r·x·dy."""
    for chunk in range(first_row(), sums.size // n, rows_apart()):
        first, last = chunk * _CHUNK_ROWS, min((chunk + 1) * _CHUNK_ROWS, rates.size)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            total = ZERO
            for row in range(first, last):
                total += rates[row] * x[row * n + j] * dy[row * n + j]
            sums[chunk * n + j] = total


@kernel
def _sum_chunks(dw, sums):
    for j in range(cuda.grid(1), dw.size, cuda.gridsize(1)):
        total = ZERO
        for at in range(j, sums.size, dw.size):
            total += sums[at]
        dw[j] = total


def _chunks(node: Tensor) -> tuple[int, int]:
    """(rows of x, chunks of them)."""
    x = node.src[0]
    n_rows = x.n_elements // x.shape[-1]
    return n_rows, -(-n_rows // _CHUNK_ROWS)


def _back_w_scratch(node: Tensor, compute: str) -> int:
    n_rows, n_chunks = _chunks(node)
    return 4 * (n_rows + n_chunks * node.shape[-1])


def _back_w(site: CudaSite) -> Call:
    x, dy = site.src
    n, (n_rows, n_chunks) = site.node.shape[-1], _chunks(site.node)
    scratch = site.scratch.view(np.float32)
    rates, sums = scratch[:n_rows], scratch[n_rows : n_rows + n_chunks * n]
    return in_turn(
        per_rows(_rates, n_rows, n, site.stream, rates, x, n, *site.scalars),
        per_rows(_weighted_sums, n_chunks, n, site.stream, sums, x, dy, rates, n),
        per_element(_sum_chunks, n, site.stream, site.out, sums),
    )


# -- fusions ------------------------------------------------------------------------------------


def _is_residual(t: Tensor) -> bool:
    return t.src[0].shape == t.src[1].shape == t.shape


def _adds_first(nodes: Sequence[Tensor], is_read: Sequence[bool], compute: Compute) -> bool:
    """norm(a + b)·w, and, of three nodes, a + b in BF16."""
    add, *copies, norm = nodes
    reads_sum = norm.src[0] is add and norm.src[1].n_elements == norm.shape[-1]
    rounds = all(c.src[0] is add and c.dtype is BF16 for c in copies)
    fits = holds_rows(norm) and lies_in_fours(*add.src, norm.src[1])
    return reads_sum and rounds and fits and _is_residual(add)


def _bind_add_norm(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    add, *copies, norm = sites
    n = norm.node.shape[-1]
    (a, b), n_rows = add.src, norm.node.n_elements // n
    copy = copies[0].out if copies else norm.out
    total = add.out if is_read[0] else norm.out
    arrays = norm.out, a, norm.src[1], total, b, copy, is_read[0]
    run = _forward(_fours(n, a, b), True, bool(copies), _types(add.node, norm.node))
    return per_rows(run, n_rows, n, norm.stream, *arrays, n, *norm.scalars)


def _adds_last(nodes: Sequence[Tensor], is_read: Sequence[bool], compute: Compute) -> bool:
    """a + the norm's gradient"""
    back, add = nodes
    is_sum = add.src[1] is back and _is_residual(add) and back.dtype is F32
    return is_sum and holds_rows(back) and lies_in_fours(*back.src, add.src[0])


def _bind_back_add(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    back, add = sites
    n, (x, _, dy) = back.node.shape[-1], back.node.src
    dx = back.out if is_read[0] else add.out
    arrays = dx, *back.src, add.out, add.src[0], is_read[0]
    run = _backward(_fours(n, *back.src), True, _types(x, dy, back.node))
    n_rows = back.node.n_elements // n
    return per_rows(run, n_rows, n, back.stream, *arrays, n, *back.scalars)


def _sum_and_norm(rng: np.random.Generator) -> Graph:
    x = ops.add(drawn(rng, 6, 40), drawn(rng, 6, 40))
    return Graph.of(ops.rms_norm_mul(x, drawn(rng, 40), eps=1e-3), ops.scale(x, 2.0))


def _sum_copy_and_norm(rng: np.random.Generator) -> Graph:
    x = ops.add(drawn(rng, 6, 40), drawn(rng, 6, 40))
    return Graph.of(ops.cpy(x, BF16), ops.rms_norm_mul(x, drawn(rng, 40), eps=1e-3))


def _gradient_and_sum(rng: np.random.Generator) -> Graph:
    dx = rms_norm_mul_back(drawn(rng, 6, 40), drawn(rng, 40), drawn(rng, 6, 40), eps=1e-3)
    return Graph.of(ops.add(drawn(rng, 6, 40), dx))


declare("rms_norm_mul", CudaKernel(_bind))
declare("rms_norm_mul_back", CudaKernel(_bind_back))
declare("rms_norm_mul_back_w", CudaKernel(_back_w, scratch=_back_w_scratch))
ADD_NORM = Fusion(
    ("add", "rms_norm_mul"), _adds_first, _bind_add_norm, _sum_and_norm, Memory.INPLACE
)
ADD_COPY_NORM = Fusion(
    ("add", "cpy", "rms_norm_mul"), _adds_first, _bind_add_norm, _sum_copy_and_norm, Memory.INPLACE
)
NORM_BACK_ADD = Fusion(
    ("rms_norm_mul_back", "add"), _adds_last, _bind_back_add, _gradient_and_sum, Memory.INPLACE
)
