"""How far rows of logits x are from probabilities of a few tokens.

soft_cross_entropy   L = Σ over rows i of w_i · −(Σ_s q_is · ln p_is + q_i,rest · ln p_i,rest)

p = softmax(x); q has a row's k targets s, and all other tokens together as one: p_rest is the sum
of theirs. With q of a teacher, L less the entropy of q is the KL divergence from student to teacher
over these k + 1 cases. With Q = Σ_s q_s + q_rest, commonly 1,

    dL/dx_s = w · (Q · p_s − q_s)      dL/dx_v = w · p_v · (Q − q_rest / p_rest) of the others

With β above 0 it is the generalised Jensen-Shannon divergence (Agarwal et al. 2023,
arXiv:2306.13649), of which m = (1 − β)·p + β·q, and at 1 the divergence from teacher to student:

    L = Σ w · Σ over the k + 1 cases of β·q·ln(q/m) + (1 − β)·p·ln(p/m)      at 1 of p·ln(p/q)

Its gradient is the same with −dL/d ln p in the place of q: (1 − β)·p·ln(m/p), at 1 p·ln(q/p).
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.formulas.formula import formula, joint
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.op import Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import exp32, row_max
from pyggml.kernels.formulas import inline_formula
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.arithmetic.arith import mul
from pyggml.ops.expect import expect, expect_type
from pyggml.ops.formulas import LEAST, case_loss, case_pull

_LOSS, _PULL = formula(case_loss), formula(case_pull)
CASE = joint("case", [_LOSS, _PULL])  # what one of the k + 1 adds to a loss, and −dL/d ln p
_case = inline_formula(CASE)
ONE_TARGET = np.array([1, 0], np.float32)  # what is wanted of a row's only target, and of others
_ZERO, _LEAST = np.float32(0), np.float32(LEAST)
BETAS = (0.0, 0.3, 1.0)  # of samples
NO_BETA = (-0.1, 1.1, float("nan"))  # values that expect_beta refuses


def soft_cross_entropy(
    logits: Tensor, targets: Tensor, shares: Tensor, weights: Tensor, beta: float = 0.0
) -> Tensor:
    """Weighted sum of the cross entropies of rows with probabilities of some tokens, of shape ().
    beta, 0 to 1: above 0 of their generalised Jensen-Shannon divergences.

    logits (n, n_vocab) F32; targets (n, k) I32, all different in a row; shares (n, k + 1) F32, the
    probabilities of these, then of all other tokens together; weights (n,) F32. `saved[0]` of the
    result, () F32, counts the rows of weight other than 0 whose first target has the greatest
    logit. The kernel raises PyggmlError if a target is outside the vocabulary.
    """
    return SOFT_CROSS_ENTROPY(logits, targets, shares, weights, beta=float(beta))


def expect_beta(name: str, beta: float) -> None:
    """Raises ShapeError unless it is 0 to 1."""
    if not 0 <= beta <= 1:
        raise ShapeError(f"{name}: beta is {beta}, wanted 0 to 1")


def expect_shares(
    name: str, logits: Shape, targets: Tensor, shares: Tensor, weights: Tensor
) -> None:
    """Raises ShapeError if they do not fit logits of this shape."""
    n, n_vocab = logits
    k = targets.shape[1] if len(targets.shape) == 2 else 0
    if targets.dtype is not I32 or targets.shape != (n, k) or not 1 <= k <= n_vocab:
        fault = f"targets are {targets!r}, wanted I32 [{n}, k], k of 1 to {n_vocab} tokens"
        raise ShapeError(f"{name}: {fault}")
    expect(name, "shares", shares, (n, k + 1))
    expect(name, "weights", weights, (n,))


def _spec(logits: Tensor, *goals: Tensor, beta: float) -> Spec:
    expect_beta("soft_cross_entropy", beta)
    expect_type("soft_cross_entropy", "logits", logits)
    if len(logits.shape) != 2 or 0 in logits.shape:
        fault = f"logits are {logits!r}, wanted two axes, none empty"
        raise ShapeError(f"soft_cross_entropy: {fault}")
    expect_shares("soft_cross_entropy", (logits.shape[0], logits.shape[1]), *goals)
    return Spec(())


@kernel
def _soft_row(dx, x, targets, shares, weight, beta):
    """The loss of a row; dx becomes its gradient."""
    top, k = row_max(x), targets.size
    for j in range(x.size):
        dx[j] = exp32(x[j] - top)
    for s in range(k):
        dx[targets[s]] = _ZERO
    rest = _ZERO
    for j in range(x.size):
        rest += dx[j]
    rest = max(rest, _LEAST)
    norm = rest
    for s in range(k):
        norm += exp32(x[targets[s]] - top)
    log_norm = np.log(norm)
    loss, q_rest = _case(shares[k], np.log(rest) - log_norm, beta)
    mass = q_rest
    for s in range(k):
        term, q = _case(shares[s], x[targets[s]] - top - log_norm, beta)
        loss, mass = loss + term, mass + q
    factor = weight * (mass / norm - q_rest / rest)
    for j in range(x.size):
        dx[j] *= factor
    for s in range(k):
        above = x[targets[s]] - top
        _, q = _case(shares[s], above - log_norm, beta)
        dx[targets[s]] = weight * (mass * exp32(above) / norm - q)
    return weight * loss


@parallel
def _soft_rows(losses, right, dx, x, targets, shares, weights, beta):
    for i in prange(x.shape[0]):
        losses[i] = _soft_row(dx[i], x[i], targets[i], shares[i], weights[i], beta)
        right[i] = weights[i] != _ZERO and x[i, targets[i, 0]] == row_max(x[i])


def _soft_cross_entropy(
    beta: np.float32, out: np.ndarray, n_right: np.ndarray, dx: np.ndarray, x: np.ndarray,
    *goals: np.ndarray,
) -> None:  # fmt: skip
    targets, n_vocab = goals[0], x.shape[1]
    if not 0 <= targets.min() <= targets.max() < n_vocab:
        raise PyggmlError(f"soft_cross_entropy: a target is outside the {n_vocab} tokens")
    losses, right = np.empty(len(x), np.float32), np.empty(len(x), np.bool_)
    _soft_rows(losses, right, dx, x, *goals, beta)
    out[...], n_right[...] = losses.sum(dtype=np.float64), right.sum()


def _run(site: Site) -> Call:
    beta = np.float32(site.node.params["beta"])
    return Call(_soft_cross_entropy, beta, site.out, *site.saved, *site.src)


def cases(q: np.ndarray, log_p: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Of probabilities (n, k + 1): the loss of each row (n,), and −dL/d ln p of each case."""
    how = {"beta": q.dtype.type(beta)}
    with np.errstate(all="ignore"):  # logits may not be finite
        return _LOSS(q, log_p, **how).sum(axis=1), _PULL(q, log_p, **how)


def soft_rows(
    z: np.ndarray,
    targets: np.ndarray,
    shares: np.ndarray,
    weights: np.ndarray,
    *,
    beta: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row of logits and their gradients, in float64."""
    e, rows = np.exp(z - z.max(-1, keepdims=True)), np.arange(len(z))[:, None]
    targets, rest_of_row = targets.astype(np.int64), e.copy()
    rest_of_row[rows, targets] = 0
    rest, norm = np.maximum(rest_of_row.sum(-1, keepdims=True), _LEAST), e.sum(-1, keepdims=True)
    log_p = np.log(np.concatenate([e[rows, targets], rest], axis=1) / norm)
    losses, pulls = cases(shares, log_p, beta)
    mass = pulls.sum(-1, keepdims=True)
    slopes = rest_of_row * (mass / norm - pulls[:, -1:] / rest)
    slopes[rows, targets] = mass * e[rows, targets] / norm - pulls[:, :-1]
    return weights * losses, weights[:, None] * slopes


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dlogits = weight · (Q · softmax(logits) - q) · dy on targets, in the forward kernel

    Of other tokens it is weight · p · (Q - q_rest / p_rest) · dy. What is wanted is data.
    """
    return mul(node.saved[1], dy), None, None, None


def soft_wanted(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, ...]]:
    """Logits with targets, shares and weights: without others; with some; of one target alone."""
    for n, n_vocab, k in ((3, 4, 4), (7, int(rng.integers(40, 90)), 5), (4, 30, 1)):
        z = rng.standard_normal((n, n_vocab))
        targets = np.array([rng.permutation(n_vocab)[:k] for _ in range(n)], np.int32)
        shares = rng.dirichlet(np.ones(k + 1), n)
        if k == n_vocab:
            shares[:, -1] = 0
        yield z, targets, shares, rng.uniform(0.1, 1, n) * (rng.random(n) < 0.7)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for arrays in soft_wanted(rng):
        for beta in BETAS:
            yield Sample(arrays, {"beta": beta})


SOFT_CROSS_ENTROPY = op(
    name="soft_cross_entropy",
    spec=_spec,
    ref=lambda *arrays, beta: np.asarray(soft_rows(*arrays, beta=beta)[0].sum()),
    grad=_grad,
    samples=_samples,
    refuses={"beta": NO_BETA},
    saved=lambda logits, *_, beta: (Spec(()), Spec(logits.shape)),
    costly=True,
)
cpu_kernel(SOFT_CROSS_ENTROPY, _run)
