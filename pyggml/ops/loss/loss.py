"""Cross entropy between rows of logits x and their labels or targets: one number, or one a row.

cross_entropy_loss        L  = mean over rows of Σ l·(ln Σ e^x − x), l the row's labels
cross_entropy_loss_back   dx = d·(softmax(x)·Σ l − l) / n_rows      (ggml takes Σ l to be 1)
                          with a mask, only rows where it is above 1/2 count
cross_entropy_rows        L  = Σ over rows i of w_i·(ln Σ e^x − x[target_i])
cross_entropy_rows_back   dx = d·w_i·(softmax(x) − onehot(target_i))
cross_entropy_by_row      L_i = w_i·(ln Σ e^x − x[target_i]), the terms of cross_entropy_rows, for
                          losses that are more than a sum over tokens

d is d(loss)/dL. Rows are summed in float64.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.formulas.formula import GRADIENT, Formula, formula, gradient_formula, joint
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor, leaf
from pyggml.jit import kernel
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.kernels.rows import call_by_row
from pyggml.ops import formulas
from pyggml.ops.arithmetic.arith import mul
from pyggml.ops.expect import expect, expect_axes, expect_type

_SECOND_ORDER = NoGrad("second derivatives are out of scope")


def cross_entropy_loss(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the rows of the cross entropy, a scalar of shape () (ggml's CROSS_ENTROPY_LOSS).

    logits and labels (..., n_vocab) F32; labels are weights, commonly probabilities. With a mask
    (...) F32 only rows where it is above 1/2 count. The mask has no gradient.
    """
    return CROSS_ENTROPY_LOSS(logits, labels, *(() if mask is None else (mask,)))


def cross_entropy_loss_back(
    d: Tensor, logits: Tensor, labels: Tensor, mask: Tensor | None = None
) -> Tensor:
    """d(loss)/d(logits) of cross_entropy_loss, given the scalar d = d(loss)/d(its result)."""
    return CROSS_ENTROPY_LOSS_BACK(d, logits, labels, *(() if mask is None else (mask,)))


def cross_entropy_rows(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the cross entropies of rows with one target each, of shape ().

    logits (n, n_vocab) F32, targets (n,) I32, weights (n,) F32. `saved[0]` of the result, () F32,
    counts the rows of weight other than 0 whose target has the greatest logit. The kernel raises
    PyggmlError if a target is outside the vocabulary, whatever its weight.
    """
    return CROSS_ENTROPY_ROWS(logits, targets, weights)


def cross_entropy_rows_back(d: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """d(loss)/d(logits) of cross_entropy_rows, given the scalar d = d(loss)/d(its result)."""
    return CROSS_ENTROPY_ROWS_BACK(d, logits, targets, weights)


@kernel
def _sum(out, terms):
    total = np.float64(0)
    for i in range(terms.size):
        total += terms[i]
    out[0] = total


def two_rows(node: Tensor, compute: Compute) -> int:
    """Scratch: two numbers for each row of logits, the first source that has rows."""
    logits = next(s for s in node.src if s.shape)
    return 2 * prod(logits.shape[:-1]) * F32.block_bytes


def _halves(scratch: np.ndarray) -> np.ndarray:
    return scratch.view(np.float32).reshape(2, -1)


def _gradient(name: str, of: Formula) -> Formula:
    """By the logits; d(loss)/d(result) comes first."""
    return replace(gradient_formula(name, of, "logits"), sources=(GRADIENT, *of.sources))


SHARE = formula(formulas.share)
LABELLED = formula(formulas.labelled, single=("share",))
LABELLED_BACK = _gradient("labelled_back", LABELLED)
CROSS_ENTROPY = formula(formulas.cross_entropy, single=("token", "weight"))
_RIGHT = formula(formulas.is_right, single=("token", "weight"))
ROWS = joint("cross_entropy_rows", [CROSS_ENTROPY, _RIGHT])
ROWS_BACK = _gradient("cross_entropy_rows_back", CROSS_ENTROPY)

# -- cross_entropy_loss -------------------------------------------------------------------------


def _labels_fit(name: str, logits: Tensor, labels: Tensor, *mask: Tensor) -> None:
    expect_type(name, "logits", logits)
    expect(name, "labels", labels, logits.shape)
    if 0 in logits.shape[-1:]:
        raise ShapeError(f"{name}: logits are {logits!r}, wanted a vocabulary that is not empty")
    for m in mask:
        expect(name, "mask", m, logits.shape[:-1])


def _cross_entropy_loss_spec(logits: Tensor, labels: Tensor, *mask: Tensor) -> Spec:
    _labels_fit("cross_entropy_loss", logits, labels, *mask)
    return Spec(())


def equal_shares(n_rows: int) -> np.ndarray:
    """The weight of each row in the mean of all, once for all rows."""
    return np.full(1, 1 / max(n_rows, 1), np.float32)


def _with_shares(of: Formula, out: np.ndarray, site: Site, n: int) -> list[Call]:
    """The calls for a formula of the first n sources and of the shares that the mask gives rows."""
    first, mask = site.src[:n], site.src[n:]
    shares = _halves(site.scratch)[0]
    calls = [call_by_row(SHARE, [shares], [mask[0].reshape(-1)])] if mask else []
    if not mask:
        shares = equal_shares(shares.size)
    return [*calls, call_by_row(of, [out], [*first, shares])]


def _cross_entropy_loss_run(site: Site) -> Call:
    terms = _halves(site.scratch)[1]
    calls = _with_shares(LABELLED, terms, site, 2)
    return Call(one_by_one, [*calls, Call(_sum, site.out.reshape(1), terms)])


def _mean_shares(logits: np.ndarray, *mask: np.ndarray) -> np.ndarray:
    weights = mask[0] if mask else np.ones(logits.shape[:-1])
    return SHARE(weights.reshape(-1)).reshape(weights.shape)


def _cross_entropy_loss_ref(
    logits: np.ndarray, labels: np.ndarray, *mask: np.ndarray
) -> np.ndarray:
    return np.asarray(LABELLED(logits, labels, _mean_shares(logits, *mask)).sum())


def _cross_entropy_loss_grad(node: Tensor, d: Tensor) -> tuple[Tensor | None, ...]:
    """dlogits = dy · (softmax(logits) · Σ labels - labels) / n_rows"""
    return cross_entropy_loss_back(d, *node.src), *(None for _ in node.src[1:])


def _cross_entropy_loss_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 2), (4, 50), (2, 3, 33)]:
        logits = 3 * rng.standard_normal(shape)
        yield Sample((logits, rng.dirichlet(np.ones(shape[-1]), shape[:-1])))
        yield Sample((logits, rng.uniform(0, 1, shape)))  # sums other than 1
        mask = rng.choice([0.0, 0.4, 0.6, 1.0], shape[:-1])
        yield Sample((logits, rng.uniform(0, 1, shape), mask))


CROSS_ENTROPY_LOSS = op(
    name="cross_entropy_loss",
    ggml=GGMLOp.CROSS_ENTROPY_LOSS,
    spec=_cross_entropy_loss_spec,
    ref=_cross_entropy_loss_ref,
    grad=_cross_entropy_loss_grad,
    samples=_cross_entropy_loss_samples,
    costly=True,
)
cpu_kernel(CROSS_ENTROPY_LOSS, _cross_entropy_loss_run, scratch=two_rows)

# -- cross_entropy_loss_back --------------------------------------------------------------------


def _cross_entropy_loss_back_spec(d: Tensor, logits: Tensor, labels: Tensor, *mask: Tensor) -> Spec:
    expect("cross_entropy_loss_back", "d", d, ())
    _labels_fit("cross_entropy_loss_back", logits, labels, *mask)
    return Spec(logits.shape)


def _cross_entropy_loss_back_run(site: Site) -> Call:
    return Call(one_by_one, _with_shares(LABELLED_BACK, site.out, site, 3))


def _cross_entropy_loss_back_ref(
    d: np.ndarray, logits: np.ndarray, labels: np.ndarray, *mask: np.ndarray
) -> np.ndarray:
    return LABELLED_BACK(d, logits, labels, _mean_shares(logits, *mask))


def _with_d(
    samples: Callable[[np.random.Generator], Iterator[Sample]], rng: np.random.Generator
) -> Iterator[Sample]:
    """The forward op's samples, each with a d before its arrays."""
    for s in samples(rng):
        yield Sample((np.array(rng.uniform(0.5, 2)), *s.arrays))


CROSS_ENTROPY_LOSS_BACK = op(
    name="cross_entropy_loss_back",
    ggml=GGMLOp.CROSS_ENTROPY_LOSS_BACK,
    spec=_cross_entropy_loss_back_spec,
    ref=_cross_entropy_loss_back_ref,
    grad=_SECOND_ORDER,
    samples=partial(_with_d, _cross_entropy_loss_samples),
)
cpu_kernel(CROSS_ENTROPY_LOSS_BACK, _cross_entropy_loss_back_run, scratch=two_rows)

# -- cross_entropy_rows -------------------------------------------------------------------------


def rows_fit(name: str, logits: Tensor, targets: Tensor, weights: Tensor) -> None:
    expect_type(name, "logits", logits)
    expect_axes(name, "logits", logits, 2)
    expect(name, "targets", targets, logits.shape[:1], I32)
    expect(name, "weights", weights, logits.shape[:1])


def _cross_entropy_rows_spec(logits: Tensor, targets: Tensor, weights: Tensor) -> Spec:
    rows_fit("cross_entropy_rows", logits, targets, weights)
    return Spec(())


def cross_entropies(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(n,) float32 −ln softmax(row)[target] of logits (n, n_vocab) float32, targets (n,) int32."""
    losses = np.empty(len(targets), np.float32)
    call_by_row(CROSS_ENTROPY, [losses], [logits, targets, np.ones(1, np.float32)])()
    return losses


def expect_targets(targets: np.ndarray, n_vocab: int) -> None:
    """PyggmlError for the first target outside the vocabulary."""
    wrong = np.flatnonzero((targets < 0) | (targets >= n_vocab))
    if wrong.size:
        i = wrong[0]
        raise PyggmlError(
            f"cross_entropy_rows: target {targets[i]} of row {i} is outside the vocabulary of "
            f"{n_vocab} tokens"
        )


def _checked(site: Site, *calls: Call) -> Call:
    """The calls, once the targets are found to be tokens."""
    *_, logits, targets, _weights = site.src
    return Call(one_by_one, [Call(expect_targets, targets, logits.shape[-1]), *calls])


def _cross_entropy_rows_run(site: Site) -> Call:
    losses, right = rows = _halves(site.scratch)
    sums = Call(_sum, site.out.reshape(1), losses), Call(_sum, site.saved[0].reshape(1), right)
    return _checked(site, call_by_row(ROWS, [*rows], site.src), *sums)


def _cross_entropy_rows_grad(node: Tensor, d: Tensor) -> tuple[Tensor | None, ...]:
    """dlogits_i = dy · weight_i · (softmax(logits_i) - target_i)"""
    return cross_entropy_rows_back(d, *node.src), None, None


def cross_entropy_rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n, n_vocab in [(1, 2), (4, 52), (7, 33)]:
        targets = rng.integers(0, n_vocab, n, np.int32)
        weights = rng.uniform(0, 1, n) * (rng.uniform(0, 1, n) < 0.8)  # some rows do not count
        yield Sample((3 * rng.standard_normal((n, n_vocab)), targets, weights))


CROSS_ENTROPY_ROWS = op(
    name="cross_entropy_rows",
    spec=_cross_entropy_rows_spec,
    ref=lambda *sources: np.asarray(CROSS_ENTROPY(*sources).sum()),
    grad=_cross_entropy_rows_grad,
    samples=cross_entropy_rows_samples,
    saved=lambda *_: (Spec(()),),
    costly=True,
)
cpu_kernel(CROSS_ENTROPY_ROWS, _cross_entropy_rows_run, scratch=two_rows)

# -- cross_entropy_rows_back --------------------------------------------------------------------


def _cross_entropy_rows_back_spec(
    d: Tensor, logits: Tensor, targets: Tensor, weights: Tensor
) -> Spec:
    expect("cross_entropy_rows_back", "d", d, ())
    rows_fit("cross_entropy_rows_back", logits, targets, weights)
    return Spec(logits.shape)


def _cross_entropy_rows_back_run(site: Site) -> Call:
    return _checked(site, call_by_row(ROWS_BACK, [site.out], site.src))


CROSS_ENTROPY_ROWS_BACK = op(
    name="cross_entropy_rows_back",
    spec=_cross_entropy_rows_back_spec,
    ref=ROWS_BACK,
    formula=ROWS_BACK,
    grad=_SECOND_ORDER,
    samples=partial(_with_d, cross_entropy_rows_samples),
)
cpu_kernel(CROSS_ENTROPY_ROWS_BACK, _cross_entropy_rows_back_run)

# -- one number for each row ----------------------------------------------------------------------


def cross_entropy_by_row(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The terms of `cross_entropy_rows`, (n,) F32.

    logits (n, n_vocab) F32, targets (n,) I32, weights (n,) F32. The kernel raises PyggmlError if
    a target is outside the vocabulary, whatever its weight.
    """
    return CROSS_ENTROPY_BY_ROW(logits, targets, weights)


def _spec(logits: Tensor, targets: Tensor, weights: Tensor) -> Spec:
    rows_fit("cross_entropy_by_row", logits, targets, weights)
    return Spec(targets.shape)


def _run(site: Site) -> Call:
    return _checked(site, call_by_row(CROSS_ENTROPY, [site.out], site.src))


def _grad(node: Tensor, d: Tensor) -> tuple[Tensor | None, ...]:
    """dlogits_i = dy_i · weight_i · (softmax(logits_i) - target_i)

    This is cross_entropy_rows_back with each row's weight multiplied by its d.
    """
    logits, targets, weights = node.src
    one = leaf(np.ones((), np.float32))
    return cross_entropy_rows_back(one, logits, targets, mul(weights, d)), None, None


CROSS_ENTROPY_BY_ROW = op(
    name="cross_entropy_by_row",
    spec=_spec,
    ref=lambda *sources: CROSS_ENTROPY(*sources)[..., 0],
    formula=CROSS_ENTROPY,
    grad=_grad,
    samples=cross_entropy_rows_samples,
    costly=True,
)
cpu_kernel(CROSS_ENTROPY_BY_ROW, _run)
