"""The output layer and the loss in one op, which makes the logits of a few rows at a time.

linear_cross_entropy_by_row   L_t = weights_t · (log Σ_v exp z_tv − z_t,target),  z = h·wᵀ
linear_cross_entropy          L = Σ_t L_t
linear_soft_cross_entropy     L = Σ_t weights_t · −(Σ_s q_ts · log p_ts + q_t,rest · log p_t,rest),
                              or a divergence of q and p: see pyggml.ops.loss.soft

The last one has probabilities q of some tokens s, and one for all others together; p = softmax z,
p_rest is the sum over the others (pyggml.ops.loss.soft). The first two are those of one s, q = 1.

The forward kernel also counts the rows t, of weight other than 0, whose target, or first s, has the
greatest z. With gradient=True it computes dL_t/dh_t too. A row's loss depends on that row of h
alone, so the backward pass only scales these rows.
With a softcap c, z is c·tanh(h·wᵀ / c) instead, and its slope 1 − (z/c)² enters the gradient.

The full (n_tokens, n_vocab) matrix never exists; on Intel's tiles (pyggml.ops.loss.head_amx) no row
of it does. The unfused twins are mul_mat, then cross_entropy_by_row, cross_entropy_rows or
soft_cross_entropy. The gradient of w is an op of its own (pyggml.ops.loss.head_back).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pyggml.errors import NoGradientError, ShapeError
from pyggml.formulas.softcap import SOFTCAP
from pyggml.graph.call import Call
from pyggml.graph.op import Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.arithmetic.arith import mul
from pyggml.ops.expect import NONE_FROM_ZERO
from pyggml.ops.layout.layout import reshape
from pyggml.ops.loss import head_amx, head_slices
from pyggml.ops.loss.head_back import expect_layer, expect_targets, linear_cross_entropy_back_w
from pyggml.ops.loss.head_slices import Goals
from pyggml.ops.loss.soft import (
    BETAS,
    NO_BETA,
    ONE_TARGET,
    expect_beta,
    expect_shares,
    soft_rows,
    soft_wanted,
)

_CHUNK_BYTES = 192 << 20  # of what is made of a chunk's rows at once


def linear_cross_entropy(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    weights: Tensor,
    gradient: bool = True,
    softcap: float = 0.0,
) -> Tensor:
    """Weighted sum of the cross entropies of the rows of h·wᵀ, a scalar () float32.

    h (T, K) float32, w (V, K) of any type, targets (T,) int32 in [0, V), weights (T,) float32; rows
    of weight 0 cost nothing. gradient=False leaves out what only training needs. softcap, 0 for
    none, caps the logits. `saved[0]` of the
    result, () float32, counts the rows of weight other than 0 whose target has the greatest logit.
    Raises ShapeError if shapes or types do not fit, and, when computed, if a target is out of
    range.
    """
    return LINEAR_CROSS_ENTROPY(h, w, targets, weights, gradient=gradient, softcap=float(softcap))


def linear_cross_entropy_by_row(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    weights: Tensor,
    gradient: bool = True,
    softcap: float = 0.0,
) -> Tensor:
    """The terms of `linear_cross_entropy`, (T,) float32: arguments and errors are the same."""
    return LINEAR_CROSS_ENTROPY_BY_ROW(
        h, w, targets, weights, gradient=gradient, softcap=float(softcap)
    )


def linear_soft_cross_entropy(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    shares: Tensor,
    weights: Tensor,
    gradient: bool = True,
    softcap: float = 0.0,
    beta: float = 0.0,
) -> Tensor:
    """Weighted sum of the cross entropies of the rows of h·wᵀ with probabilities, a scalar ().
    beta, 0 to 1: above 0 of their generalised Jensen-Shannon divergences.

    targets (T, k) int32, all different in a row; shares (T, k + 1) float32, the probabilities of
    these, then of all other tokens together. The rest is as of `linear_cross_entropy`; the target
    that counts as right is a row's first.
    """
    sources = h, w, targets, shares, weights
    how = {"softcap": float(softcap), "beta": float(beta)}
    return LINEAR_SOFT_CROSS_ENTROPY(*sources, gradient=gradient, **how)


def _spec(
    h: Tensor, w: Tensor, targets: Tensor, weights: Tensor, *, gradient: bool, softcap: float
) -> Spec:
    expect_layer("linear_cross_entropy", h, w, softcap)
    expect_targets("linear_cross_entropy", h.shape[0], targets, weights)
    return Spec(())


def _soft_spec(
    h: Tensor, w: Tensor, targets: Tensor, shares: Tensor, weights: Tensor,
    *, gradient: bool, softcap: float, beta: float,
) -> Spec:  # fmt: skip
    name = "linear_soft_cross_entropy"
    expect_beta(name, beta)
    expect_layer(name, h, w, softcap)
    expect_shares(name, (h.shape[0], w.shape[0]), targets, shares, weights)
    return Spec(())


def _spec_by_row(h: Tensor, *sources: Tensor, gradient: bool, softcap: float) -> Spec:
    _spec(h, *sources, gradient=gradient, softcap=softcap)
    return Spec(h.shape[:1])


@dataclass(frozen=True, slots=True)
class _Chunk(ABC):
    """One way to compute a chunk of C rows: the bound weight, and scratch."""

    w: gemm.Weight
    h: np.ndarray  # (C, K)
    dh: np.ndarray  # (C, K)
    own: Scratch  # the other arrays of `layout`

    @classmethod
    def of(cls, node: Tensor, w: gemm.Weight, h: np.ndarray, dh: np.ndarray, own: Scratch) -> Self:
        """One bound to a node's weight and scratch."""
        return cls(w, h, dh, own)

    @staticmethod
    @abstractmethod
    def takes(node: Tensor, compute: Compute) -> bool:
        """Whether it computes this node."""

    @staticmethod
    @abstractmethod
    def layout(node: Tensor, compute: Compute) -> Layout:
        """Scratch for a chunk: its gathered rows h, their gradients dh, and more."""

    @abstractmethod
    def compute(self, goals: Goals, gradient: bool) -> tuple[np.ndarray, int]:
        """(losses (n,) of the first n gathered rows, how many have the first target on top); with
        `gradient`, it also fills dh. wanted: of these n rows."""


@dataclass(frozen=True, slots=True)
class _SlicedLogits(_Chunk):
    """Logits of a slice of the vocabulary become its share of the gradient
    (pyggml.ops.loss.head_slices)."""

    how: tuple[np.float32, float]  # the cap and β of the loss
    bound: dict[tuple[int, bool], list[head_slices.Slice]]  # those of the latest n

    @classmethod
    def of(cls, node: Tensor, w: gemm.Weight, h: np.ndarray, dh: np.ndarray, own: Scratch) -> Self:
        how = np.float32(node.params["softcap"]), node.params.get("beta", 0.0)
        return cls(w, h, dh, own, how, {})

    @staticmethod
    def takes(node: Tensor, compute: Compute) -> bool:
        return True

    @staticmethod
    def layout(node: Tensor, compute: Compute) -> Layout:
        (n_rows, k), w = node.src[0].shape, node.src[1]
        n = _equal_chunks(n_rows, head_slices.ROWS)
        rows = Array((n, k))
        own = head_slices.arrays(n, k, _n_targets(node), w, compute, node.params["gradient"])
        return Layout(h=rows, dh=rows, **own)

    def compute(self, goals: Goals, gradient: bool) -> tuple[np.ndarray, int]:
        n = len(goals.targets)
        h, o, most = self.h[:n], self.dh[:n], len(self.h)
        if (n, gradient) not in self.bound:
            self.bound.clear()
            slices = head_slices.bind_slices(self.w, h, o if gradient else None, most, self.own)
            self.bound[n, gradient] = slices
        slices = self.bound[n, gradient]
        return head_slices.run(slices, self.w, (h, o), goals, self.how, self.own)


@dataclass(frozen=True, slots=True)
class _FusedLogits(_Chunk):
    """Logits stay in the cache (pyggml.ops.loss.head_amx); of cross entropies alone."""

    @staticmethod
    def takes(node: Tensor, compute: Compute) -> bool:
        h, w = node.src[:2]
        fits = head_amx.takes(h.shape[0], w.dtype, compute, node.params["softcap"])
        return fits and not node.params.get("beta")

    @staticmethod
    def layout(node: Tensor, compute: Compute) -> Layout:
        (n_rows, k), n_vocab = node.src[0].shape, node.src[1].shape[0]
        c = rows_within(n_rows, head_amx.row_bytes(k), _CHUNK_BYTES)
        rows = Array((c, k))
        own = head_amx.arrays(c, n_vocab, k, node.params["gradient"], _n_targets(node))
        return Layout(h=rows, dh=rows, **own)

    def compute(self, goals: Goals, gradient: bool) -> tuple[np.ndarray, int]:
        n = len(goals.targets)
        losses, tops = np.empty(n, np.float32), np.empty(n, np.float32)
        results = head_amx.HeadResults(losses, tops, self.dh[:n])
        head_amx.call(self.w, self.h[:n], goals, results, gradient, self.own)()
        return losses, int((self.own["target_logits"][:n, 0] == tops).sum())


def _n_targets(node: Tensor) -> int:
    """Of a position."""
    targets = node.src[2].shape
    return targets[1] if len(targets) == 2 else 1


_WAYS: tuple[type[_Chunk], ...] = (_FusedLogits, _SlicedLogits)


def _way(node: Tensor, compute: Compute) -> type[_Chunk]:
    """The first that takes the node."""
    return next(way for way in _WAYS if way.takes(node, compute))


def _by_chunk(
    n_right: np.ndarray,
    dh: np.ndarray | None,
    h: np.ndarray,
    goals: Goals,
    chunk: _Chunk,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(row numbers, losses) of one chunk after another. n_right and dh are filled on the way."""
    rows, targets = np.flatnonzero(goals.weights), goals.targets
    n_vocab = len(chunk.w.data)
    if rows.size and not 0 <= targets[rows].min() <= targets[rows].max() < n_vocab:
        raise ShapeError(f"linear_cross_entropy: a target is outside the {n_vocab} tokens")
    n_right[...] = 0
    if dh is not None:
        dh[:] = 0
    for first in range(0, rows.size, chunk.h.shape[0]):
        positions = rows[first : first + chunk.h.shape[0]]
        np.take(h, positions, axis=0, out=chunk.h[: positions.size])
        losses, n = chunk.compute(Goals(*(a[positions] for a in goals)), dh is not None)
        n_right += n
        if dh is not None:
            dh[positions] = chunk.dh[: positions.size]
        yield positions, losses


def _sum_up(out: np.ndarray, *arguments: Any) -> None:
    """The sum of all losses, added up in float64."""
    out[...] = sum(float(losses.sum(dtype=np.float64)) for _, losses in _by_chunk(*arguments))


def _put_by_row(out: np.ndarray, *arguments: Any) -> None:
    out[:] = 0
    for rows, losses in _by_chunk(*arguments):
        out[rows] = losses


def rows_within(n_rows: int, row_bytes: int, most: int) -> int:
    """Rows of a chunk: equal chunks within so many bytes, but a register tile at least."""
    return _equal_chunks(n_rows, max(gemm.FLOAT_TILE.mr, most // row_bytes))


def _equal_chunks(n_rows: int, most: int) -> int:
    """Rows of a chunk, with chunks as few and as equal as can be."""
    return -(-n_rows // -(-n_rows // most))


def _scratch(node: Tensor, compute: Compute) -> int:
    return _way(node, compute).layout(node, compute).n_bytes


def _run(site: Site) -> Call:
    h, w, targets, *shares, weights = site.src
    chunk = _chunk(site, gemm.Weight(w, site.node.src[1].dtype, site.compute))
    n_right, *dh = site.saved
    one = np.broadcast_to(ONE_TARGET, (len(h), 2))
    goals = Goals(targets.reshape(len(h), -1), shares[0] if shares else one, weights)
    kernel = _put_by_row if site.out.ndim else _sum_up
    return Call(kernel, site.out, n_right, dh[0] if dh else None, h, goals, chunk)


def _chunk(site: Site, w: gemm.Weight) -> _Chunk:
    way = _way(site.node, site.compute)
    own = way.layout(site.node, site.compute).cut(site.scratch)
    return way.of(site.node, w, own.pop("h"), own.pop("dh"), own)


def _ref_by_row(
    h: np.ndarray,
    w: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    *,
    gradient: bool,
    softcap: float,
) -> np.ndarray:
    z = h @ w.T
    z = SOFTCAP(z, cap=softcap) if softcap else z
    top = z.max(-1, keepdims=True)
    log_sum = np.log(np.exp(z - top).sum(-1)) + top[:, 0]
    rows = np.arange(len(z))
    return np.asarray(weights * (log_sum - z[rows, targets.astype(np.int64)]))


def _soft_ref(
    h: np.ndarray, w: np.ndarray, *goals: np.ndarray, gradient: bool, softcap: float, beta: float
) -> np.ndarray:
    z = h @ w.T
    z = SOFTCAP(z, cap=softcap) if softcap else z
    return np.asarray(soft_rows(z, *goals, beta=beta)[0].sum())


def _ref(*arrays: np.ndarray, gradient: bool, softcap: float) -> np.ndarray:
    return np.asarray(np.sum(_ref_by_row(*arrays, gradient=gradient, softcap=softcap)))


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dh = weight · (softmax(h·Wᵀ) - target)·W · dy, dW = weight · (softmax(h·Wᵀ) - target)ᵀ·h · dy

    dh comes from the forward kernel, dW from an op of its own. Weights are data.
    """
    if not node.params["gradient"]:
        name = "" if node.op is None else node.op.name
        raise NoGradientError(f"{name} at {node!r} was built with gradient=False, wanted True")
    h, w, *goals, weights = node.src
    by_row = reshape(dy, (-1, 1)) if dy.shape else dy
    cap, beta = node.params["softcap"], node.params.get("beta", 0.0)
    dw = linear_cross_entropy_back_w(h, w, *goals, mul(weights, dy), softcap=cap, beta=beta)
    return mul(node.saved[1], by_row), dw, *(None for _ in node.src[2:])


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for t, v, k, cap in ((1, 3, 2, 0.0), (5, 70, 8, 0.0), (30, 33, 40, 0.0), (9, 20, 8, 1.5)):
        h, w = rng.standard_normal((t, k)), rng.standard_normal((v, k))
        targets = rng.integers(0, v, t).astype(np.int32)
        weights = rng.uniform(0.1, 1, t) * (rng.random(t) < 0.7)
        yield Sample((h, w, targets, weights), {"gradient": True, "softcap": cap})


def _soft_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for (z, *goals), k, cap in zip(soft_wanted(rng), (2, 40, 8), (0.0, 0.0, 1.5), strict=True):
        h, w = rng.standard_normal((len(z), k)), rng.standard_normal((z.shape[1], k))
        for beta in BETAS:
            yield Sample((h, w, *goals), {"gradient": True, "softcap": cap, "beta": beta})


_BOTH: dict[str, Any] = {
    "grad": _grad,
    "refuses": {"gradient": (), "softcap": NONE_FROM_ZERO},
    "saved": lambda h, *_, gradient, **how: (Spec(()), Spec(h.shape)) if gradient else (Spec(()),),
    "costly": True,
}
LINEAR_CROSS_ENTROPY = op(
    name="linear_cross_entropy",
    spec=_spec,
    ref=_ref,
    samples=_samples,
    fuses=("mul_mat", "cross_entropy_rows", "cross_entropy_rows_back", "out_prod"),
    **_BOTH,
)
LINEAR_CROSS_ENTROPY_BY_ROW = op(
    name="linear_cross_entropy_by_row",
    spec=_spec_by_row,
    ref=_ref_by_row,
    samples=_samples,
    fuses=("mul_mat", "cross_entropy_by_row", "cross_entropy_rows_back", "out_prod"),
    **_BOTH,
)
LINEAR_SOFT_CROSS_ENTROPY = op(
    name="linear_soft_cross_entropy",
    spec=_soft_spec,
    ref=_soft_ref,
    samples=_soft_samples,
    fuses=("mul_mat", "soft_cross_entropy", "out_prod"),
    **{**_BOTH, "refuses": {**_BOTH["refuses"], "beta": NO_BETA}},
)
for _op in (LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_BY_ROW, LINEAR_SOFT_CROSS_ENTROPY):
    cpu_kernel(_op, _run, scratch=_scratch)
