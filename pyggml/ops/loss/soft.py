"""Cross entropy between rows of logits x and probabilities of a few tokens.

soft_cross_entropy   L = Σ over rows i of w_i · −(Σ_s q_is · ln p_is + q_i,rest · ln p_i,rest)

p = softmax(x); q has a row's k targets s, and all other tokens together as one: p_rest is the sum
of theirs. With q of a teacher, L less the entropy of q is the KL divergence from student to teacher
over these k + 1 cases. With Q = Σ_s q_s + q_rest, commonly 1,

    dL/dx_s = w · (Q · p_s − q_s)      dL/dx_v = w · p_v · (Q − q_rest / p_rest) of the others
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import exp32, row_max
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.arithmetic.arith import mul
from pyggml.ops.expect import expect, expect_type

_ZERO, _LEAST = np.float32(0), np.float32(np.finfo(np.float32).tiny)


def soft_cross_entropy(logits: Tensor, targets: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the cross entropies of rows with probabilities of some tokens, of shape ().

    logits (n, n_vocab) F32; targets (n, k) I32, all different in a row; shares (n, k + 1) F32, the
    probabilities of these, then of all other tokens together; weights (n,) F32. `saved[0]` of the
    result, () F32, counts the rows of weight other than 0 whose first target has the greatest
    logit. The kernel raises PyggmlError if a target is outside the vocabulary.
    """
    return SOFT_CROSS_ENTROPY(logits, targets, shares, weights)


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


def _spec(logits: Tensor, *wanted: Tensor) -> Spec:
    expect_type("soft_cross_entropy", "logits", logits)
    if len(logits.shape) != 2 or 0 in logits.shape:
        fault = f"logits are {logits!r}, wanted two axes, none empty"
        raise ShapeError(f"soft_cross_entropy: {fault}")
    expect_shares("soft_cross_entropy", (logits.shape[0], logits.shape[1]), *wanted)
    return Spec(())


@kernel
def _soft_row(dx, x, targets, shares, weight):
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
    norm, mass, q_rest = rest, shares[k], shares[k]
    for s in range(k):
        norm += exp32(x[targets[s]] - top)
        mass += shares[s]
    loss = q_rest * (np.log(norm) - np.log(rest)) if q_rest > _ZERO else _ZERO
    factor = weight * (mass / norm - q_rest / rest)
    for j in range(x.size):
        dx[j] *= factor
    for s in range(k):
        above, q = x[targets[s]] - top, shares[s]
        if q > _ZERO:
            loss += q * (np.log(norm) - above)
        dx[targets[s]] = weight * (mass * exp32(above) / norm - q)
    return weight * loss


@parallel
def _soft_rows(losses, right, dx, x, targets, shares, weights):
    for i in prange(x.shape[0]):
        losses[i] = _soft_row(dx[i], x[i], targets[i], shares[i], weights[i])
        right[i] = weights[i] != _ZERO and x[i, targets[i, 0]] == row_max(x[i])


def _soft_cross_entropy(
    out: np.ndarray, n_right: np.ndarray, dx: np.ndarray, x: np.ndarray, *wanted: np.ndarray
) -> None:
    targets, n_vocab = wanted[0], x.shape[1]
    if not 0 <= targets.min() <= targets.max() < n_vocab:
        raise PyggmlError(f"soft_cross_entropy: a target is outside the {n_vocab} tokens")
    losses, right = np.empty(len(x), np.float32), np.empty(len(x), np.bool_)
    _soft_rows(losses, right, dx, x, *wanted)
    out[...], n_right[...] = losses.sum(dtype=np.float64), right.sum()


def _run(site: Site) -> Call:
    return Call(_soft_cross_entropy, site.out, *site.saved, *site.src)


def soft_losses(
    z: np.ndarray, targets: np.ndarray, shares: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The loss of each row of logits, in float64."""
    top = z.max(-1, keepdims=True)
    e, rows = np.exp(z - top), np.arange(len(z))[:, None]
    targets, q_rest = targets.astype(np.int64), shares[:, -1]
    others = e.copy()
    others[rows, targets] = 0
    rest, norm = others.sum(-1), e.sum(-1)
    of_rest = np.log(np.where(q_rest > 0, rest, 1)) - np.where(q_rest > 0, np.log(norm), 0)
    of_targets = np.log(e[rows, targets] / norm[:, None])
    return np.asarray(-weights * ((shares[:, :-1] * of_targets).sum(-1) + q_rest * of_rest))


def _ref(*arrays: np.ndarray) -> np.ndarray:
    return np.asarray(soft_losses(*arrays).sum())


def _saved(logits: Tensor, *_: Tensor) -> tuple[Spec, ...]:
    return Spec(()), Spec(logits.shape)


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
        yield Sample(arrays)


SOFT_CROSS_ENTROPY = op(
    name="soft_cross_entropy",
    ggml=GGMLOp.CUSTOM,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    saved=_saved,
    costly=True,
)
cpu_kernel(SOFT_CROSS_ENTROPY, _run)
