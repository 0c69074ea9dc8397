"""Rows of logits with several targets.

`LossRows` are rows with k targets, of each of which a probability is wanted, and one of all other
tokens together (pyggml.ops.loss.soft); a cross entropy has one target, of probability 1. The logits
of targets are taken out of their row, where -inf is left: beside a target that is nearly certain,
the sum of the others would lose its digits. All other gradients are factor · e^(z − maximum) then,
and those of the targets are put in their places.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.blocks import block_max, block_sum
from pyggml.backends.cuda.code.formulas import LOG2_E, ONE, ZERO, device_formula, softcap_back
from pyggml.backends.cuda.code.fours import load_four
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits, put_four_bf16
from pyggml.backends.cuda.ops.layout.copies import copy_of
from pyggml.backends.cuda.ops.loss.row_ends import (
    EACH,
    LOWEST,
    lies_in_fours,
    row_ends,
    softcap_unless_out,
    sum_of,
)
from pyggml.backends.cuda.ops.norm.by_row import target_fault
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_row
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.ops.formulas import LEAST
from pyggml.ops.loss.soft import CASE, ONE_TARGET

_LEAST = np.float32(LEAST)
_case = device_formula(CASE)


@device
def _take_targets(z, start, slopes, targets, first, k, n, cap):
    """The greatest logit of a thread's targets in a row, and whether all are tokens. `slopes` from
    `first` on become the logits of all, which are taken out."""
    top, are_tokens = LOWEST, True
    for s in range(first + cuda.threadIdx.x, first + k, cuda.blockDim.x):
        target, slopes[s] = targets[s], LOWEST
        if 0 <= target < n:
            slopes[s] = softcap_unless_out(z[start + target], cap)
        else:
            are_tokens = False
        top = max(top, slopes[s])
    cuda.syncthreads()
    for s in range(first + cuda.threadIdx.x, first + k, cuda.blockDim.x):
        if 0 <= targets[s] < n:
            z[start + targets[s]] = LOWEST
    cuda.syncthreads()
    return top, are_tokens


@cache
def _loss_kernel(in_fours: bool) -> Any:
    maximum_and_sum = row_ends(in_fours)

    @kernel
    def loss_rows(
        z, losses, right, ends, slopes, targets, shares, weights, k, n, cap, beta, fault, number
    ):  # fmt: skip
        """The losses of rows of logits, and whether the first target of a counting row is on top.
        ends: of each row the maximum, and the factor of the others' gradients; slopes: the
        targets'."""
        parts = cuda.shared.array(THREADS, np.float32)
        for i in range(cuda.blockIdx.x, losses.size, cuda.gridDim.x):
            start, first, weight = np.int64(i) * n, i * k, weights[i]
            counts, mine, apart = weight != ZERO, first + cuda.threadIdx.x, cuda.blockDim.x
            share = i * (k + 1) % shares.size - first  # from a target to its share
            greatest, are_tokens = _take_targets(z, start, slopes, targets, first, k, n, cap)
            if counts and not are_tokens:
                cuda.atomic.max(fault, 0, number)
            highest, rest = maximum_and_sum(z, start, n, cap, parts)
            top = max(highest, block_max(greatest, parts))
            rest *= math.exp(highest - top)
            rest = _LEAST if rest < _LEAST else rest
            total = ZERO
            for s in range(mine, first + k, apart):
                total += math.exp(slopes[s] - top)
            norm = rest + block_sum(total, parts)
            log_norm, loss, mass = math.log(norm), ZERO, ZERO
            for s in range(mine, first + k, apart):
                term, pull = _case(shares[s + share], slopes[s] - top - log_norm, beta)
                loss += term
                mass += pull
            term, pull = _case(shares[first + k + share], math.log(rest) - log_norm, beta)
            loss, mass = block_sum(loss, parts) + term, block_sum(mass, parts) + pull
            if cuda.threadIdx.x == 0:
                losses[i] = weight * loss if counts else ZERO
                right[i] = ONE if counts and slopes[first] == top else ZERO
                ends[2 * i] = top
                ends[2 * i + 1] = weight * (mass / norm - pull / rest) if counts else ZERO
            for s in range(mine, first + k, apart):
                logit = slopes[s]
                _, pull = _case(shares[s + share], logit - top - log_norm, beta)
                slope = weight * (mass * math.exp(logit - top) / norm - pull) if counts else ZERO
                slopes[s] = softcap_back(logit, slope, cap) if cap > ZERO else slope

    return loss_rows


@cache
def _target_slopes(rounds: bool) -> Any:
    """A device function that puts the gradients of a row's targets, when the others stand."""

    @device
    def put(out, start, slopes, targets, first, k, n):
        cuda.syncthreads()
        for s in range(first + cuda.threadIdx.x, first + k, cuda.blockDim.x):
            if 0 <= targets[s] < n:
                if rounds:
                    out[start + targets[s]] = bf16_bits(slopes[s])
                else:
                    out[start + targets[s]] = slopes[s]

    return put


_put_rounded = _target_slopes(True)


@kernel
def _rounded_gradients(z, out, ends, slopes, targets, k, n):
    """The gradients of `_gradient_kernel` where it rounds and there is no cap. A thread takes eight
    numbers at a time. Powers of two are exact enough for bfloat16."""
    apart = 4 * cuda.blockDim.x
    for i in range(cuda.blockIdx.x, ends.size // 2, cuda.gridDim.x):
        start, top, factor = np.int64(i) * n, ends[2 * i] * LOG2_E, ends[2 * i + 1]
        for first in range(0, n, 2 * apart):
            j = first + 4 * cuda.threadIdx.x
            m, j_read = j + apart, min(j, n - 4)
            a, b = load_four(z, start + j_read), load_four(z, start + min(m, n - 4))
            cuda.syncthreads()
            if j < n:
                _put_slopes(out, 2 * start + j, a, top, factor)
            if m < n:
                _put_slopes(out, 2 * start + m, b, top, factor)
        _put_rounded(out, 2 * start, slopes, targets, i * k, k, n)


@device
def _put_slopes(out, at, four, top, factor):
    """Four gradients in bfloat16: factor · e^(logit − maximum)."""
    if factor != ZERO:
        a = factor * ptx.power_of_two(four[0] * LOG2_E - top)
        b = factor * ptx.power_of_two(four[1] * LOG2_E - top)
        c = factor * ptx.power_of_two(four[2] * LOG2_E - top)
        d = factor * ptx.power_of_two(four[3] * LOG2_E - top)
        put_four_bf16(out, at, a, b, c, d)
    else:
        put_four_bf16(out, at, ZERO, ZERO, ZERO, ZERO)


@device
def _slope(logit, top, factor, cap):
    """factor · e^(logit − maximum) · the slope of the cap."""
    if factor == ZERO or logit == LOWEST:
        return ZERO
    slope = factor * math.exp(logit - top)
    return softcap_back(logit, slope, cap) if cap > ZERO else slope


@cache
def _gradient_kernel(rounds: bool) -> Any:
    """z becomes its gradient. Rounded to bfloat16, a row's lies in the first half of the row: all
    threads have read some numbers before any of them writes there."""
    put, width = _target_slopes(rounds), 2 if rounds else 1

    @kernel
    def gradients(z, out, ends, slopes, targets, k, n, cap):
        four = cuda.local.array(EACH, np.float32)
        apart = cuda.blockDim.x
        for i in range(cuda.blockIdx.x, ends.size // 2, cuda.gridDim.x):
            start, top, factor = np.int64(i) * n, ends[2 * i], ends[2 * i + 1]
            for first in range(0, n, EACH * apart):
                j = first + cuda.threadIdx.x
                for e in range(EACH):
                    at = j + e * apart
                    four[e] = softcap_unless_out(z[start + at], cap) if at < n else ZERO
                if rounds:
                    cuda.syncthreads()
                for e in range(EACH):
                    at = j + e * apart
                    if at < n:
                        slope = _slope(four[e], top, factor, cap)
                        if rounds:
                            out[width * start + at] = bf16_bits(slope)
                        else:
                            out[width * start + at] = slope
            put(out, width * start, slopes, targets, i * k, k, n)

    return gradients


class LossRows(NamedTuple):
    """Rows that lose by their logits: what is wanted of them, and what becomes of them."""

    losses: Any  # (n)
    right: Any  # (n): 1 if a row counts and its first target is on top, else 0
    ends: Any  # (2n), see _loss_kernel
    slopes: Any  # (n · k)
    targets: Any  # (n · k)
    shares: Any  # (n · (k + 1)): probabilities of these and of the others; k + 1, if all want alike
    weights: Any  # (n)

    @property
    def k(self) -> int:
        return int(self.targets.size // self.weights.size)

    def part(self, span: slice) -> Self:
        """The rows of a span."""
        n = self.weights.size

        def cut(a: Any) -> Any:
            each = a.size // n
            return a[each * span.start : each * span.stop]

        rows = type(self)(*map(cut, self))
        return rows._replace(shares=self.shares) if self.shares.size == self.k + 1 else rows


def row_bytes(n: int, k: int) -> int:
    """Scratch for the numbers of n rows of k targets."""
    return (4 + k) * n * F32.block_bytes


def loss_rows(site: CudaSite, sources: Sequence[Any], scratch: Any) -> LossRows:
    """The rows of a node with these sources: targets, shares if it has them, weights."""
    targets, *shares, weights = sources
    numbers, n = scratch.view(np.float32), weights.size
    return LossRows(
        losses=site.out if site.node.shape else numbers[:n],
        right=numbers[n : 2 * n],
        ends=numbers[2 * n : 4 * n],
        slopes=numbers[4 * n : 4 * n + targets.size],
        targets=targets,
        shares=shares[0] if shares else site.constant(ONE_TARGET),
        weights=weights,
    )


def losses_of(site: CudaSite, z: Any, rows: LossRows) -> Call:
    """A call that makes the losses of rows of logits, and what their gradients are made of."""
    n_rows, params = rows.weights.size, site.node.params
    n, fault = z.size // n_rows, target_fault(site, z.size // n_rows)
    cap, beta = (np.float32(params.get(name, 0.0)) for name in ("softcap", "beta"))
    run = _loss_kernel(lies_in_fours(z, n))
    return per_row(run, n_rows, n, site.stream, z, *rows, rows.k, n, cap, beta, *fault)


def gradients_of(site: CudaSite, z: Any, rows: LossRows, rounds: bool = False) -> Call:
    """A call by which these logits become their gradients, rounded to bfloat16 or not."""
    n_rows = rows.weights.size
    n, cap = z.size // n_rows, np.float32(site.node.params.get("softcap", 0.0))
    out = z.view(np.uint16) if rounds else z
    arguments = z, out, rows.ends, rows.slopes, rows.targets, rows.k, n
    if rounds and not cap and n % 4 == 0 and ptx.TENSOR_CORES:
        return per_row(_rounded_gradients, n_rows, n, site.stream, *arguments)
    return per_row(_gradient_kernel(rounds), n_rows, n, site.stream, *arguments, cap)


def _soft(site: CudaSite) -> Call:
    logits, *sources = site.src
    (right, dz), rows = site.saved, loss_rows(site, sources, site.scratch)
    return in_turn(
        copy_of(dz, logits, site.node.src[0], site.stream),
        losses_of(site, dz, rows),
        gradients_of(site, dz, rows),
        sum_of(site.out, rows.losses, site.stream),
        sum_of(right, rows.right, site.stream),
    )


declare("soft_cross_entropy", _soft, scratch=lambda node, compute: row_bytes(*node.src[1].shape))
