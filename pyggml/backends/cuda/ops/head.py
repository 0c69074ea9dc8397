"""The output layer and the loss in one: the logits of some rows at a time, and their gradient.

The (rows × vocabulary) matrix never exists as a whole. The matrix of the layer is unpacked once for
all rows if that does not take too much memory; or once for all steps, by an op of its own, where a
card has room (rewrites/unpacked.py). Rows of weight 0 have gradients of 0; they cost as much as
others here.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.blocks import block_max, block_sum
from pyggml.backends.cuda.code.formulas import LOG2_E, softcap, softcap_back
from pyggml.backends.cuda.code.fours import load_four
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits, put_four_bf16
from pyggml.backends.cuda.gemm import CudaOperands, CudaProblem, Factor, path_of
from pyggml.backends.cuda.ops.by_row import target_fault
from pyggml.backends.cuda.ops.losses import sum_of
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import (
    ALIGNMENT,
    Compute,
    CudaKernel,
    CudaSite,
    OwnOp,
    is_of,
    own_op,
)
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_row
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.cuda.weights.unpack import unpack
from pyggml.errors import ShapeError
from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.graph.arrays import array
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32, DType
from pyggml.graph.op import OPS, Op, Sample, Spec
from pyggml.graph.tensor import Tensor
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.sizes import round_up

LOSSES = "linear_cross_entropy", "linear_cross_entropy_by_row"
LOGITS_BYTES = 480 << 20  # of all logits that exist at once: 800 rows of 150,000 tokens
WEIGHTS_BYTES = 1 << 30  # of a matrix that is unpacked once for all of them
_ROWS, _EACH = 64, 4
_ZERO, _ONE, _LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)


@device
def _cap(z, cap):
    return softcap(z, cap) if cap > _ZERO else z


@device
def _maximum_and_sum(z, start, n, cap, parts):
    """(maximum, Σ e^(z − maximum)) of a row; each thread has four numbers under way."""
    top, total, apart = _LOWEST, _ZERO, cuda.blockDim.x
    four = cuda.local.array(_EACH, np.float32)
    for j in range(cuda.threadIdx.x, n, _EACH * apart):
        highest = top
        for e in range(_EACH):
            at = j + e * apart
            four[e] = _cap(z[start + at], cap) if at < n else _LOWEST
        for e in range(_EACH):
            highest = max(highest, four[e])
        base = highest if highest > _LOWEST else _ZERO
        total *= math.exp(top - base)
        for e in range(_EACH):
            total += math.exp(four[e] - base)
        top = highest
    highest = block_max(top, parts)
    base = highest if highest > _LOWEST else _ZERO
    return highest, block_sum(total * math.exp(top - base), parts)


@device
def _slope(logit, top, total, weight, is_target, cap):
    """weight · (softmax − onehot) · the slope of the cap."""
    if weight == _ZERO:
        return _ZERO
    p = math.exp(logit - top) / total
    share = weight * (p - _ONE if is_target else p)
    return softcap_back(logit, share, cap) if cap > _ZERO else share


@kernel
def _softmax_rows(z, losses, right, targets, weights, n, cap, fault, number, ends):
    """The losses of rows of logits, whether the target of a counting row is on top, and each row's
    maximum and sum (ends)."""
    parts = cuda.shared.array(THREADS, np.float32)
    for i in range(cuda.blockIdx.x, losses.size, cuda.gridDim.x):
        start, target, weight = np.int64(i) * n, targets[i], weights[i]
        top, total = _maximum_and_sum(z, start, n, cap, parts)
        if cuda.threadIdx.x == 0:
            losses[i] = right[i] = _ZERO
            ends[2 * i], ends[2 * i + 1] = top, total
            if 0 <= target < n and weight != _ZERO:
                logit = _cap(z[start + target], cap)
                losses[i] = weight * (math.log(total) + top - logit)
                right[i] = _ONE if logit == top else _ZERO
            elif weight != _ZERO:
                cuda.atomic.max(fault, 0, number)


@kernel
def _rounded_gradients(z, out, targets, weights, n, ends):
    """The gradients of `_gradient_kernel` where it rounds and there is no cap. A thread takes eight
    numbers at a time. Powers of two are exact enough for bfloat16."""
    apart = 4 * cuda.blockDim.x
    for i in range(cuda.blockIdx.x, targets.size, cuda.gridDim.x):
        start, target, weight = np.int64(i) * n, targets[i], weights[i]
        top, share = ends[2 * i] * LOG2_E, weight / ends[2 * i + 1]
        for first in range(0, n, 2 * apart):
            j = first + 4 * cuda.threadIdx.x
            k, j_read = j + apart, min(j, n - 4)
            a, b = load_four(z, start + j_read), load_four(z, start + min(k, n - 4))
            cuda.syncthreads()
            if j < n:
                _put_slopes(out, 2 * start, j, a, top, share, target, weight)
            if k < n:
                _put_slopes(out, 2 * start, k, b, top, share, target, weight)


@device
def _put_slopes(out, start, j, four, top, share, target, weight):
    """Four gradients in bfloat16: share · e^(logit − maximum), less the weight at the target."""
    if weight != _ZERO:
        a = share * ptx.power_of_two(four[0] * LOG2_E - top)
        b = share * ptx.power_of_two(four[1] * LOG2_E - top)
        c = share * ptx.power_of_two(four[2] * LOG2_E - top)
        d = share * ptx.power_of_two(four[3] * LOG2_E - top)
        a, b = a - weight * (target == j), b - weight * (target == j + 1)
        c, d = c - weight * (target == j + 2), d - weight * (target == j + 3)
        put_four_bf16(out, start + j, a, b, c, d)
    else:
        put_four_bf16(out, start + j, _ZERO, _ZERO, _ZERO, _ZERO)


@cache
def _gradient_kernel(rounds: bool) -> Any:
    """z becomes its gradient. Rounded to bfloat16, a row's lies in the first half of the row: all
    threads have read some numbers before any of them writes there."""

    @kernel
    def gradients(z, out, targets, weights, n, cap, ends):
        four = cuda.local.array(_EACH, np.float32)
        apart = cuda.blockDim.x
        for i in range(cuda.blockIdx.x, targets.size, cuda.gridDim.x):
            start, target, weight = np.int64(i) * n, targets[i], weights[i]
            top, total = ends[2 * i], ends[2 * i + 1]
            for first in range(0, n, _EACH * apart):
                j = first + cuda.threadIdx.x
                for e in range(_EACH):
                    at = j + e * apart
                    four[e] = _cap(z[start + at], cap) if at < n else _ZERO
                if rounds:
                    cuda.syncthreads()
                for e in range(_EACH):
                    at = j + e * apart
                    if at < n:
                        share = _slope(four[e], top, total, weight, at == target, cap)
                        if rounds:
                            out[2 * start + at] = bf16_bits(share)
                        else:
                            out[start + at] = share

    return gradients


def _chunk_rows(n_rows: int, n_vocab: int) -> int:
    """Rows whose logits exist at once: nearly equal chunks."""
    most = max(16, LOGITS_BYTES // (F32.block_bytes * n_vocab))
    if n_rows <= most:
        return n_rows
    return min(most, round_up(-(-n_rows // -(-n_rows // most)), _ROWS))


def _products(
    node: Tensor, n_rows: int, kind: DType, compute: Compute
) -> tuple[CudaProblem, CudaProblem]:
    """Logits z = h·wᵀ of n_rows rows, and dh = dz·w, with w of this type."""
    n_vocab, k = node.src[1].shape
    by_token, by_column = Factor(k, 1, dtype=kind), Factor(1, k, dtype=kind)
    logits = CudaProblem(n_rows, n_vocab, k, Factor(k, 1), by_token, compute=compute)
    back = CudaProblem(n_rows, k, n_vocab, Factor(n_vocab, 1), by_column, compute=compute)
    return logits, back


def _sizes(node: Tensor) -> tuple[int, int, int]:
    """(rows, rows of a chunk, rows of the last chunk)."""
    n_rows, n_vocab = node.src[0].shape[0], node.src[1].shape[0]
    chunk = _chunk_rows(n_rows, n_vocab)
    return n_rows, chunk, n_rows % chunk or chunk


def unpacked_bytes(node: Tensor, compute: Compute) -> int:
    """Bytes of the matrix as its products unpack it, 0 if they do not."""
    (_, chunk, _), w = _sizes(node), node.src[1]
    logits, _ = _products(node, chunk, w.dtype, compute)
    return BF16.block_bytes * w.n_elements if _rounds(logits) and w.dtype is not BF16 else 0


def _whole_bytes(node: Tensor, compute: Compute) -> int:
    """These bytes if a run unpacks it once for several products, else 0."""
    n_rows, chunk, _ = _sizes(node)
    pays = (n_rows > chunk or node.params["gradient"]) and not _lasting(node)
    n_bytes = unpacked_bytes(node, compute) if pays else 0
    return n_bytes if n_bytes <= WEIGHTS_BYTES else 0


def _kind(node: Tensor, compute: Compute) -> DType:
    """The type of w as the products get it."""
    return BF16 if _lasting(node) or _whole_bytes(node, compute) else node.src[1].dtype


def _parts(node: Tensor, compute: Compute) -> tuple[int, int, int]:
    """Bytes of scratch for the logits of a chunk, for four numbers of each row, and for w."""
    n_rows, chunk, _ = _sizes(node)
    size, n_vocab = F32.block_bytes, node.src[1].shape[0]
    whole = _whole_bytes(node, compute)
    z, numbers = size * chunk * n_vocab, 4 * size * n_rows
    return round_up(z, ALIGNMENT), round_up(numbers, ALIGNMENT), round_up(whole, ALIGNMENT)


def _scratch(node: Tensor, compute: Compute) -> int:
    _, *chunks = _sizes(node)
    kind, wanted = _kind(node, compute), 0
    for n_rows in chunks:
        logits, back = _products(node, n_rows, kind, compute)
        wanted = max(wanted, path_of(logits).scratch(logits))
        if not _rounds(
            back
        ):  # else dz is rounded in its own memory, and w takes no more than above
            wanted = max(wanted, path_of(back).scratch(back))
    return sum(_parts(node, compute)) + wanted


def _rounds(p: CudaProblem) -> bool:
    """Whether the product takes its left factor in bfloat16."""
    return p.rounds and path_of(p).shares


def _lacks(node: Tensor) -> str | None:
    w = node.src[1]
    return None if w.is_contiguous else f"the rows of {w!r} have gaps between them"


def _matrix(site: CudaSite, at: int) -> tuple[Any, list[Call]]:
    """w as the products get it, in scratch from byte `at` on if it is unpacked in every run; and
    what unpacks it there."""
    node, packed = site.node, site.src[1]
    lasting, n_bytes = _lasting(node), BF16.block_bytes * node.src[1].n_elements
    kind = node.src[1].dtype, site.stream
    if lasting is not None:
        memory, is_new = site.lasting(*lasting)
        w = memory.view(np.uint16)
        if is_new:
            unpack(w, packed.view(np.uint8), *kind)()
        return w, []
    if not _whole_bytes(node, site.compute):
        return packed, []
    w = site.scratch[at : at + n_bytes].view(np.uint16)
    return w, [unpack(w, packed.view(np.uint8), *kind)]


def _bind(site: CudaSite) -> Call:
    n_rows, chunk, _ = _sizes(site.node)
    z_bytes, row_bytes, w_bytes = _parts(site.node, site.compute)
    z = site.scratch[:z_bytes].view(np.float32)
    numbers = site.scratch[z_bytes : z_bytes + row_bytes].view(np.float32)
    losses, right, ends = numbers[:n_rows], numbers[n_rows : 2 * n_rows], numbers[2 * n_rows :]
    if site.node.shape:
        losses = site.out
    w, calls, rest = (
        *_matrix(site, z_bytes + row_bytes),
        site.scratch[z_bytes + row_bytes + w_bytes :],
    )
    for first in range(0, n_rows, chunk):
        some = slice(first, min(first + chunk, n_rows))
        rows = losses[some], right[some], *(t[some] for t in site.src[2:])
        ends_of = ends[2 * some.start : 2 * some.stop]
        calls += _chunk(site, some, (z, w, rest), rows, ends_of)
    if not site.node.shape:
        calls.append(sum_of(site.out, losses, site.stream))
    return in_turn(*calls, sum_of(site.saved[0], right, site.stream))


def _chunk(
    site: CudaSite, some: slice, memory: tuple[Any, Any, Any], rows: tuple[Any, ...], ends: Any
) -> list[Call]:
    """The logits of some rows, their losses, and the rows' gradients."""
    (z, w, rest), stream = memory, site.stream
    n, (n_vocab, k) = some.stop - some.start, site.node.src[1].shape
    logits, back = _products(site.node, n, _kind(site.node, site.compute), site.compute)
    of_h, z = slice(some.start * k, some.stop * k), z[: n * n_vocab]
    cap = np.float32(site.node.params["softcap"])
    of_logits = CudaOperands(z, site.src[0][of_h], w, rest, False, stream)
    fault = target_fault(site, n_vocab)
    calls = [
        path_of(logits).bind(logits, of_logits),
        per_row(_softmax_rows, n, n_vocab, stream, z, *rows, n_vocab, cap, *fault, ends),
    ]
    if site.node.params["gradient"]:
        rounds = _rounds(back)
        dz = z.view(np.uint16) if rounds else z
        if rounds and not cap and n_vocab % 4 == 0 and ptx.TENSOR_CORES:
            calls.append(
                per_row(_rounded_gradients, n, n_vocab, stream, z, dz, *rows[2:], n_vocab, ends)
            )
        else:
            gradients = _gradient_kernel(rounds)
            calls.append(
                per_row(gradients, n, n_vocab, stream, z, dz, *rows[2:], n_vocab, cap, ends)
            )
        to_h = CudaOperands(site.saved[1][of_h], z, w, rest, False, stream)
        if rounds:
            to_h = replace(to_h, rounded=dz, is_rounded=True, rounded_step=2 * n_vocab)
        calls.append(path_of(back).bind(back, to_h))
    return calls


for _name in LOSSES:
    declare(_name, CudaKernel(_bind, lacks=_lacks, scratch=_scratch))


# -- with a matrix that stays unpacked ------------------------------------------------------------


def _lasting(node: Tensor) -> tuple[int, int] | None:
    return (1, BF16.block_bytes * node.src[1].n_elements) if is_of(node, *_LASTING) else None


def _count_and_gradient(
    h: np.ndarray, w: np.ndarray, targets: np.ndarray, weights: np.ndarray,
    *, gradient: bool, softcap: float,
) -> Iterator[np.ndarray]:  # fmt: skip
    """What a loss saves: how many rows with weight have their target on top, and dh."""
    rows, z = (np.arange(len(h)), targets.astype(np.int64)), h @ w.T
    capped = SOFTCAP(z, cap=softcap) if softcap else z
    top = capped.max(-1, keepdims=True)
    yield np.sum((capped[rows] == top[:, 0]) & (weights != 0)).astype(np.float64)
    if gradient:
        p = np.exp(capped - top)
        p /= p.sum(-1, keepdims=True)
        p[rows] -= 1
        p *= weights[:, None]
        yield (SOFTCAP_BACK(capped, p, cap=softcap) if softcap else p) @ w


def _unpacked_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for kind, n_rows, n_vocab, k, cap in (
        ("Q8_0", 30, 48, 64, 0.0),
        ("Q4_K", 19, 40, 256, 1.5),
    ):
        # Of larger logits two that are near each other change places when they are rounded.
        h, w = rng.standard_normal((n_rows, k)) / 4, packed_leaf(rng, (n_vocab, k), kind)
        array(w).flags.writeable = False  # a constant: it is unpacked when the graph is bound
        targets = rng.integers(0, n_vocab, n_rows).astype(np.int32)
        weights = rng.uniform(0.1, 1, n_rows) * (rng.random(n_rows) < 0.7)
        yield Sample((h, w, targets, weights), {"gradient": True, "softcap": cap})


def _with_lasting(op: Op) -> OwnOp:
    def spec(h: Tensor, w: Tensor, *others: Tensor, **params: Any) -> Spec:
        if w.dtype in (F32, BF16):
            raise ShapeError(f"{op.name}_unpacked: w is {w!r}, of which nothing is unpacked")
        return op.spec(h, w, *others, **params)

    def results(*arrays: np.ndarray, **params: Any) -> Iterator[np.ndarray]:
        yield op.ref(*arrays, **params)
        yield from _count_and_gradient(*arrays, **params)

    kernel = CudaKernel(_bind, lacks=_lacks, scratch=_scratch, lasting=_lasting)
    return own_op(
        name=f"{op.name}_unpacked", spec=spec, saved=op.saved, results=results,
        samples=_unpacked_samples, refuses=op.refuses, kernel=kernel,
    )  # fmt: skip


_LASTING = {op.name: op for op in map(_with_lasting, (OPS[name] for name in LOSSES))}


def with_lasting_matrix(node: Tensor) -> Tensor:
    """The node of a loss whose matrix stays unpacked, for that of one that unpacks it."""
    assert node.op is not None
    return _LASTING[f"{node.op.name}_unpacked"](*node.src, **node.params)
