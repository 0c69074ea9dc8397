"""Losses of rows of logits: the sums of the rows' losses, and the weights of rows in a mean.

Sums over rows are in float64, by one block, so that they do not depend on the grid.

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
from pyggml.backends.cuda.code.formulas import LOG2_E, device_formula, softcap, softcap_back
from pyggml.backends.cuda.code.fours import load_four, storer, vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits, put_four_bf16
from pyggml.backends.cuda.ops.layout.copies import copy_of
from pyggml.backends.cuda.ops.norm.by_row import rows_call, target_fault
from pyggml.backends.cuda.ops.reduce import row_sums
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_row
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.formula import Formula
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import cross_entropy_rows, cross_entropy_rows_back
from pyggml.ops.formulas import LEAST
from pyggml.ops.loss.loss import LABELLED, LABELLED_BACK, SHARE, equal_shares, two_rows
from pyggml.ops.loss.soft import CASE, ONE_TARGET

_EACH = 4
_ZERO, _ONE, _LOWEST, _LEAST = (np.float32(x) for x in (0, 1, -np.inf, LEAST))
_case = device_formula(CASE)


def sum_of(out: Any, terms: Any, stream: Any) -> Call:
    """A call for out = Σ terms, float32."""
    return row_sums(out, terms, terms.size, stream)


def _halves(scratch: Any) -> tuple[Any, Any]:
    numbers = scratch.view(np.float32)
    half = numbers.size // 2
    return numbers[:half], numbers[half:]


def _of_labels(of: Formula, site: CudaSite, out: Any) -> list[Call]:
    """The calls for a formula of the shares that the mask gives rows."""
    n_others, shares = len(of.sources) - 1, _halves(site.scratch)[0]
    sources, mask = site.src[:n_others], site.src[n_others:]
    calls = [rows_call(SHARE, site, shares.size, [shares], mask)] if mask else []
    if not mask:
        shares = site.constant(equal_shares(shares.size))
    n = site.node.src[n_others - 1].shape[-1]
    return [*calls, rows_call(of, site, n, [out], [*sources, shares])]


def _loss(site: CudaSite) -> Call:
    terms = _halves(site.scratch)[1]
    return in_turn(*_of_labels(LABELLED, site, terms), sum_of(site.out, terms, site.stream))


def _loss_back(site: CudaSite) -> Call:
    return in_turn(*_of_labels(LABELLED_BACK, site, site.out))


declare("cross_entropy_loss", CudaKernel(_loss, scratch=two_rows))
declare("cross_entropy_loss_back", CudaKernel(_loss_back, scratch=two_rows))

# -- rows with one target -------------------------------------------------------------------------


@device
def _cap(z, cap):
    """Of what is taken out, -inf."""
    return softcap(z, cap) if cap > _ZERO and z > _LOWEST else z


@cache
def _row_ends(in_fours: bool) -> Any:
    """What finds both ends of a row; in_fours: of rows that begin and end where four numbers are
    moved at once. Each thread has eight numbers under way."""
    n_each = 2 * _EACH

    @device
    def load(eight, z, start, first, n, cap):
        apart = cuda.blockDim.x
        for e in range(0, n_each, _EACH if in_fours else 1):
            j = first + e * apart + (_EACH if in_fours else 1) * cuda.threadIdx.x
            if in_fours:
                four, is_inside = load_four(z, start + min(j, n - _EACH)), j < n
                eight[e] = _cap(four[0], cap) if is_inside else _LOWEST
                eight[e + 1] = _cap(four[1], cap) if is_inside else _LOWEST
                eight[e + 2] = _cap(four[2], cap) if is_inside else _LOWEST
                eight[e + 3] = _cap(four[3], cap) if is_inside else _LOWEST
            else:
                eight[e] = _cap(z[start + j], cap) if j < n else _LOWEST

    @device
    def maximum_and_sum(z, start, n, cap, parts):
        """(maximum, Σ e^(z − maximum))"""
        top, total, eight = _LOWEST, _ZERO, cuda.local.array(n_each, np.float32)
        for first in range(0, n, n_each * cuda.blockDim.x):
            load(eight, z, start, first, n, cap)
            highest = top
            for e in range(n_each):
                highest = max(highest, eight[e])
            base = highest if highest > _LOWEST else _ZERO
            total *= ptx.power_of_two((top - base) * LOG2_E)
            for e in range(n_each):
                total += ptx.power_of_two((eight[e] - base) * LOG2_E)
            top = highest
        highest = block_max(top, parts)
        base = highest if highest > _LOWEST else _ZERO
        return highest, block_sum(total * math.exp(top - base), parts)

    return maximum_and_sum


@cache
def _target_kernel(in_fours: bool) -> Any:
    maximum_and_sum = _row_ends(in_fours)

    @kernel
    def target_losses(losses, right, ends, z, targets, weights, n, fault, number):
        """Of each row the loss, 1 if it counts and its target is on top, else 0, and for its
        gradient the maximum and Σ e^(z − maximum)."""
        parts = cuda.shared.array(THREADS, np.float32)
        for i in range(cuda.blockIdx.x, losses.size, cuda.gridDim.x):
            start, target, weight = np.int64(i) * n, targets[i], weights[i]
            is_token = 0 <= target < n
            highest, total = maximum_and_sum(z, start, n, _ZERO, parts)
            if cuda.threadIdx.x == 0:
                if not is_token:
                    cuda.atomic.max(fault, 0, number)
                logit = z[start + target] if is_token else highest
                counts = weight != _ZERO
                losses[i] = weight * (math.log(total) + (highest - logit)) if counts else _ZERO
                right[i] = _ONE if counts and logit == highest else _ZERO
                ends[2 * i], ends[2 * i + 1] = highest, total

    return target_losses


@cache
def _target_gradients(in_fours: bool, in_bf16: bool) -> Any:
    """kernel(out, d, ends, z, targets, weights, n); in_bf16: whether out is, of which in_fours then
    holds: rows begin and end where four numbers are moved at once."""
    put, each = storer(in_bf16), _EACH if in_fours else 1

    @device
    def slope(logit, highest, factor, is_target, whole):
        share = factor * math.exp(logit - highest)
        return share - whole if is_target else share

    @kernel
    def gradients(out, d, ends, z, targets, weights, n):
        for i in range(cuda.blockIdx.x, weights.size, cuda.gridDim.x):
            start, target, whole = np.int64(i) * n, targets[i], d[0] * weights[i]
            highest, factor = ends[2 * i], whole / ends[2 * i + 1]
            for j in range(each * cuda.threadIdx.x, n, each * cuda.blockDim.x):
                if in_fours:
                    a, b, c, e = load_four(z, start + j)
                    put(
                        out, start + j, slope(a, highest, factor, j == target, whole),
                        slope(b, highest, factor, j + 1 == target, whole),
                        slope(c, highest, factor, j + 2 == target, whole),
                        slope(e, highest, factor, j + 3 == target, whole),
                    )  # fmt: skip
                else:
                    out[start + j] = slope(z[start + j], highest, factor, j == target, whole)

    return gradients


def _lies_in_fours(z: Any, n: int) -> bool:
    """Whether all rows of n numbers begin and end where four are moved at once."""
    return n % _EACH == 0 and vectorizable(z)


def _scratch_of_rows(node: Tensor, compute: str) -> int:
    """Of each row the loss, whether it is right, and both ends."""
    return 4 * F32.block_bytes * node.src[-1].n_elements


def _losses_of_targets(site: CudaSite, z: Any, targets: Any, weights: Any) -> tuple[Any, list]:
    """(losses, right, ends) of rows of logits, and the call that makes them, in scratch."""
    n = weights.size
    numbers, size = site.scratch.view(np.float32), z.size // n
    of_rows = numbers[:n], numbers[n : 2 * n], numbers[2 * n : 4 * n]
    run, fault = _target_kernel(_lies_in_fours(z, size)), target_fault(site, size)
    call = per_row(run, n, size, site.stream, *of_rows, z, targets, weights, size, *fault)
    return of_rows, [call]


def _gradients_of_targets(site: CudaSite, ends: Any) -> Call:
    n_rows, n = site.node.shape
    d, z, *sources = site.src
    in_fours = _lies_in_fours(z, n) and vectorizable(site.out)
    run = _target_gradients(in_fours, site.out.dtype == BF16.numpy)
    return per_row(run, n_rows, n, site.stream, site.out, d, ends, z, *sources, n)


def _rows(site: CudaSite) -> Call:
    (losses, right, _), calls = _losses_of_targets(site, *site.src)
    calls += [sum_of(site.out, losses, site.stream), sum_of(site.saved[0], right, site.stream)]
    return in_turn(*calls)


def _rows_back(site: CudaSite) -> Call:
    (*_, ends), calls = _losses_of_targets(site, *site.src[1:])
    return in_turn(*calls, _gradients_of_targets(site, ends))


def _are_of_one_loss(m: Match, compute: Compute) -> bool:
    return m.is_read(m.loss)


def _bind_both(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    """The loss and its gradient, of which each row's maximum and sum are found once."""
    rows, back = sites
    (losses, right, ends), calls = _losses_of_targets(rows, *rows.src)
    calls += [sum_of(rows.out, losses, rows.stream), sum_of(rows.saved[0], right, rows.stream)]
    return in_turn(*calls, _gradients_of_targets(back, ends))


def _sample(rng: np.random.Generator) -> Graph:
    z, d, weights = drawn(rng, 5, 12), drawn(rng), drawn(rng, 5)
    targets = leaf(np.array([3, 0, 11, 5, 5], np.int32))
    loss = cross_entropy_rows(z, targets, weights)
    return Graph.of(loss, cross_entropy_rows_back(d, z, targets, weights))


CROSS_ENTROPY_BOTH = Fusion(
    near("""
        loss = cross_entropy_rows(z, targets, weights)
        dz = cross_entropy_rows_back(d, z, targets, weights)
    """),
    _are_of_one_loss, _bind_both, _sample, scratch=_scratch_of_rows,
)  # fmt: skip
declare("cross_entropy_rows", CudaKernel(_rows, scratch=_scratch_of_rows))
declare("cross_entropy_rows_back", CudaKernel(_rows_back, scratch=_scratch_of_rows))

# -- rows with several targets --------------------------------------------------------------------


@device
def _take_targets(z, start, slopes, targets, first, k, n, cap):
    """The greatest logit of a thread's targets in a row, and whether all are tokens. `slopes` from
    `first` on become the logits of all, which are taken out."""
    top, are_tokens = _LOWEST, True
    for s in range(first + cuda.threadIdx.x, first + k, cuda.blockDim.x):
        target, slopes[s] = targets[s], _LOWEST
        if 0 <= target < n:
            slopes[s] = _cap(z[start + target], cap)
        else:
            are_tokens = False
        top = max(top, slopes[s])
    cuda.syncthreads()
    for s in range(first + cuda.threadIdx.x, first + k, cuda.blockDim.x):
        if 0 <= targets[s] < n:
            z[start + targets[s]] = _LOWEST
    cuda.syncthreads()
    return top, are_tokens


@cache
def _loss_kernel(in_fours: bool) -> Any:
    maximum_and_sum = _row_ends(in_fours)

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
            counts, mine, apart = weight != _ZERO, first + cuda.threadIdx.x, cuda.blockDim.x
            share = i * (k + 1) % shares.size - first  # from a target to its share
            greatest, are_tokens = _take_targets(z, start, slopes, targets, first, k, n, cap)
            if counts and not are_tokens:
                cuda.atomic.max(fault, 0, number)
            highest, rest = maximum_and_sum(z, start, n, cap, parts)
            top = max(highest, block_max(greatest, parts))
            rest *= math.exp(highest - top)
            rest = _LEAST if rest < _LEAST else rest
            total = _ZERO
            for s in range(mine, first + k, apart):
                total += math.exp(slopes[s] - top)
            norm = rest + block_sum(total, parts)
            log_norm, loss, mass = math.log(norm), _ZERO, _ZERO
            for s in range(mine, first + k, apart):
                term, pull = _case(shares[s + share], slopes[s] - top - log_norm, beta)
                loss += term
                mass += pull
            term, pull = _case(shares[first + k + share], math.log(rest) - log_norm, beta)
            loss, mass = block_sum(loss, parts) + term, block_sum(mass, parts) + pull
            if cuda.threadIdx.x == 0:
                losses[i] = weight * loss if counts else _ZERO
                right[i] = _ONE if counts and slopes[first] == top else _ZERO
                ends[2 * i] = top
                ends[2 * i + 1] = weight * (mass / norm - pull / rest) if counts else _ZERO
            for s in range(mine, first + k, apart):
                logit = slopes[s]
                _, pull = _case(shares[s + share], logit - top - log_norm, beta)
                slope = weight * (mass * math.exp(logit - top) / norm - pull) if counts else _ZERO
                slopes[s] = softcap_back(logit, slope, cap) if cap > _ZERO else slope

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
    if factor != _ZERO:
        a = factor * ptx.power_of_two(four[0] * LOG2_E - top)
        b = factor * ptx.power_of_two(four[1] * LOG2_E - top)
        c = factor * ptx.power_of_two(four[2] * LOG2_E - top)
        d = factor * ptx.power_of_two(four[3] * LOG2_E - top)
        put_four_bf16(out, at, a, b, c, d)
    else:
        put_four_bf16(out, at, _ZERO, _ZERO, _ZERO, _ZERO)


@device
def _slope(logit, top, factor, cap):
    """factor · e^(logit − maximum) · the slope of the cap."""
    if factor == _ZERO or logit == _LOWEST:
        return _ZERO
    slope = factor * math.exp(logit - top)
    return softcap_back(logit, slope, cap) if cap > _ZERO else slope


@cache
def _gradient_kernel(rounds: bool) -> Any:
    """z becomes its gradient. Rounded to bfloat16, a row's lies in the first half of the row: all
    threads have read some numbers before any of them writes there."""
    put, width = _target_slopes(rounds), 2 if rounds else 1

    @kernel
    def gradients(z, out, ends, slopes, targets, k, n, cap):
        four = cuda.local.array(_EACH, np.float32)
        apart = cuda.blockDim.x
        for i in range(cuda.blockIdx.x, ends.size // 2, cuda.gridDim.x):
            start, top, factor = np.int64(i) * n, ends[2 * i], ends[2 * i + 1]
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
    run = _loss_kernel(_lies_in_fours(z, n))
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


def _soft_scratch(node: Tensor, compute: str) -> int:
    return row_bytes(*node.src[1].shape)


declare("soft_cross_entropy", CudaKernel(_soft, scratch=_soft_scratch))
