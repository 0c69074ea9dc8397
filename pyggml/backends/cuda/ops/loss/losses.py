"""Losses of rows of logits of which each has one target, and the weights of rows in a mean."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.fours import load_four, storer, vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.loss.row_ends import EACH, lies_in_fours, row_ends, sum_of
from pyggml.backends.cuda.ops.norm.by_row import rows_call, target_fault
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_row
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.formula import Formula
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import cross_entropy_rows, cross_entropy_rows_back
from pyggml.ops.loss.loss import LABELLED, LABELLED_BACK, SHARE, equal_shares, two_rows


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


declare("cross_entropy_loss", _loss, scratch=two_rows)
declare(
    "cross_entropy_loss_back",
    lambda s: in_turn(*_of_labels(LABELLED_BACK, s, s.out)),
    scratch=two_rows,
)

# -- rows with one target -------------------------------------------------------------------------


@cache
def _target_kernel(in_fours: bool) -> Any:
    maximum_and_sum = row_ends(in_fours)

    @kernel
    def target_losses(losses, right, ends, z, targets, weights, n, fault, number):
        """Of each row the loss, 1 if it counts and its target is on top, else 0, and for its
        gradient the maximum and Σ e^(z − maximum)."""
        parts = cuda.shared.array(THREADS, np.float32)
        for i in range(cuda.blockIdx.x, losses.size, cuda.gridDim.x):
            start, target, weight = np.int64(i) * n, targets[i], weights[i]
            is_token = 0 <= target < n
            highest, total = maximum_and_sum(z, start, n, ZERO, parts)
            if cuda.threadIdx.x == 0:
                if not is_token:
                    cuda.atomic.max(fault, 0, number)
                logit = z[start + target] if is_token else highest
                counts = weight != ZERO
                losses[i] = weight * (math.log(total) + (highest - logit)) if counts else ZERO
                right[i] = ONE if counts and logit == highest else ZERO
                ends[2 * i], ends[2 * i + 1] = highest, total

    return target_losses


@cache
def _target_gradients(in_fours: bool, in_bf16: bool) -> Any:
    """kernel(out, d, ends, z, targets, weights, n); in_bf16: whether out is, of which in_fours then
    holds: rows begin and end where four numbers are moved at once."""
    put, each = storer(in_bf16), EACH if in_fours else 1

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


def _scratch_of_rows(node: Tensor, compute: str) -> int:
    """Of each row the loss, whether it is right, and both ends."""
    return 4 * F32.block_bytes * node.src[-1].n_elements


def _losses_of_targets(site: CudaSite, z: Any, targets: Any, weights: Any) -> tuple[Any, list]:
    """(losses, right, ends) of rows of logits, and the call that makes them, in scratch."""
    n = weights.size
    numbers, size = site.scratch.view(np.float32), z.size // n
    of_rows = numbers[:n], numbers[n : 2 * n], numbers[2 * n : 4 * n]
    run, fault = _target_kernel(lies_in_fours(z, size)), target_fault(site, size)
    call = per_row(run, n, size, site.stream, *of_rows, z, targets, weights, size, *fault)
    return of_rows, [call]


def _gradients_of_targets(site: CudaSite, ends: Any) -> Call:
    n_rows, n = site.node.shape
    d, z, *sources = site.src
    in_fours = lies_in_fours(z, n) and vectorizable(site.out)
    run = _target_gradients(in_fours, site.out.dtype == BF16.numpy)
    return per_row(run, n_rows, n, site.stream, site.out, d, ends, z, *sources, n)


def _rows(site: CudaSite) -> Call:
    (losses, right, _), calls = _losses_of_targets(site, *site.src)
    calls += [sum_of(site.out, losses, site.stream), sum_of(site.saved[0], right, site.stream)]
    return in_turn(*calls)


def _rows_back(site: CudaSite) -> Call:
    (*_, ends), calls = _losses_of_targets(site, *site.src[1:])
    return in_turn(*calls, _gradients_of_targets(site, ends))


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
    lambda m, compute: m.is_read(m.loss), _bind_both, _sample, scratch=_scratch_of_rows,
)  # fmt: skip
declare("cross_entropy_rows", _rows, scratch=_scratch_of_rows)
declare("cross_entropy_rows_back", _rows_back, scratch=_scratch_of_rows)
