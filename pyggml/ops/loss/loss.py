"""Cross entropy between rows of logits x and their labels or targets: one number, or one a row.

cross_entropy_loss        L  = mean over rows of Σ l·(ln Σ e^x − x), l the row's labels
cross_entropy_loss_back   dx = d·(softmax(x)·Σ l − l) / n_rows      (ggml takes Σ l to be 1)
                          with a mask, only rows where it is above 1/2 count
cross_entropy_rows        L  = Σ over rows i of w_i·(ln Σ e^x − x[target_i])
cross_entropy_rows_back   dx = d·w_i·(softmax(x) − onehot(target_i))
cross_entropy_by_row      L_i = w_i·(ln Σ e^x − x[target_i]), the terms of cross_entropy_rows, for
                          losses that are more than a sum over tokens

d is d(loss)/dL. A row is summed in float32 lanes, the rows in float64.
"""

from collections.abc import Callable, Iterator

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F64, I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor, leaf
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import exp32, row_max
from pyggml.kernels.kernel import Compute, Site, as_rows, cpu_kernel
from pyggml.ops.arithmetic.arith import mul
from pyggml.ops.expect import expect, expect_axes, expect_type

_SECOND_ORDER = NoGrad("second derivatives are out of scope")
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)


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
def _top_and_sum(x):
    """(max x, Σ e^(x − max)) of a row."""
    top = row_max(x)
    total = _ZERO
    for j in range(x.size):
        total += exp32(x[j] - top)
    return top, total


@kernel
def _row_back(dx, x, share):
    """dx = share · softmax(x) of a row."""
    top, total = _top_and_sum(x)
    share = share / total
    for j in range(x.size):
        dx[j] = exp32(x[j] - top) * share


@kernel
def _sum(out, terms, divisor):
    total = np.float64(0)
    for i in range(terms.size):
        total += terms[i]
    out[0] = total / divisor


def _row_sums(n: int) -> Callable[[Tensor, Compute], int]:
    """Scratch: n float64 for each row of logits."""
    return lambda node, _: n * int(np.prod(node.src[0].shape[:-1])) * F64.block_bytes


def log_softmax(x: np.ndarray) -> np.ndarray:
    top = x.max(axis=-1, keepdims=True)
    return np.asarray(x - top - np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))


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


def _mask_array(site_src: tuple[np.ndarray, ...], n_rows: int) -> np.ndarray:
    """The mask (n_rows,), or ones if there is none."""
    return site_src[0].reshape(-1) if site_src else np.ones(n_rows, np.float32)


def _counting(logits: np.ndarray, *mask: np.ndarray) -> np.ndarray:
    """The weight of each row in the mean, float64."""
    counts = (mask[0] if mask else np.ones(logits.shape[:-1])) > 0.5
    return np.asarray(counts / max(counts.sum(), 1))


@kernel
def _n_counting(mask):
    n = 0
    for i in range(mask.size):
        n += mask[i] > _HALF
    return max(n, 1)


@kernel
def _label_row(x, labels):
    """Σ l·(ln Σ e^x − x) of a row, computed as Σ l · ln Σ e^(x − max) − Σ l·(x − max)."""
    top, total = _top_and_sum(x)
    mass = _ZERO
    along = _ZERO
    for j in range(x.size):
        mass += labels[j]
        along += labels[j] * (x[j] - top)
    return np.float64(mass) * np.log(np.float64(total)) - np.float64(along)


@parallel
def _cross_entropy_loss(out, x, labels, mask, terms):
    for i in prange(x.shape[0]):
        terms[i] = _label_row(x[i], labels[i]) if mask[i] > _HALF else np.float64(0)
    _sum(out, terms, _n_counting(mask))


def _cross_entropy_loss_run(site: Site) -> Call:
    x, labels = (as_rows(a) for a in site.src[:2])
    mask = _mask_array(site.src[2:], len(x))
    return Call(
        _cross_entropy_loss, site.out.reshape(1), x, labels, mask, site.scratch.view(np.float64)
    )


def _cross_entropy_loss_ref(
    logits: np.ndarray, labels: np.ndarray, *mask: np.ndarray
) -> np.ndarray:
    losses = -np.sum(labels * log_softmax(logits), axis=-1)
    return np.asarray(np.sum(_counting(logits, *mask) * losses))


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
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    costly=True,
)
cpu_kernel(CROSS_ENTROPY_LOSS, _cross_entropy_loss_run, scratch=_row_sums(1))

# -- cross_entropy_loss_back --------------------------------------------------------------------


def _cross_entropy_loss_back_spec(d: Tensor, logits: Tensor, labels: Tensor, *mask: Tensor) -> Spec:
    expect("cross_entropy_loss_back", "d", d, ())
    _labels_fit("cross_entropy_loss_back", logits, labels, *mask)
    return Spec(logits.shape)


@kernel
def _label_row_back(dx, x, labels, d):
    mass = _ZERO
    for j in range(x.size):
        mass += labels[j]
    _row_back(dx, x, mass * d)
    for j in range(x.size):
        dx[j] -= labels[j] * d


@parallel
def _cross_entropy_loss_back(dx, d, x, labels, mask):
    share = d[0] / np.float32(_n_counting(mask))
    for i in prange(x.shape[0]):
        _label_row_back(dx[i], x[i], labels[i], share if mask[i] > _HALF else _ZERO)


def _cross_entropy_loss_back_run(site: Site) -> Call:
    d, x, labels, *mask = site.src
    arrays = (as_rows(site.out), d.reshape(1), as_rows(x), as_rows(labels))
    return Call(_cross_entropy_loss_back, *arrays, _mask_array(tuple(mask), len(as_rows(x))))


def _cross_entropy_loss_back_ref(
    d: np.ndarray, logits: np.ndarray, labels: np.ndarray, *mask: np.ndarray
) -> np.ndarray:
    slope = np.exp(log_softmax(logits)) * labels.sum(axis=-1, keepdims=True) - labels
    return np.asarray(d * _counting(logits, *mask)[..., None] * slope)


def _with_d(
    samples: Callable[[np.random.Generator], Iterator[Sample]],
) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """The forward op's samples, each with a d before its arrays."""

    def back_samples(rng: np.random.Generator) -> Iterator[Sample]:
        for s in samples(rng):
            yield Sample((np.array(rng.uniform(0.5, 2)), *s.arrays))

    return back_samples


CROSS_ENTROPY_LOSS_BACK = op(
    name="cross_entropy_loss_back",
    ggml=GGMLOp.CROSS_ENTROPY_LOSS_BACK,
    spec=_cross_entropy_loss_back_spec,
    ref=_cross_entropy_loss_back_ref,
    grad=_SECOND_ORDER,
    samples=_with_d(_cross_entropy_loss_samples),
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
)
cpu_kernel(CROSS_ENTROPY_LOSS_BACK, _cross_entropy_loss_back_run)

# -- cross_entropy_rows -------------------------------------------------------------------------


def rows_fit(name: str, logits: Tensor, targets: Tensor, weights: Tensor) -> None:
    expect_type(name, "logits", logits)
    expect_axes(name, "logits", logits, 2)
    expect(name, "targets", targets, logits.shape[:1], I32)
    expect(name, "weights", weights, logits.shape[:1])


def _cross_entropy_rows_spec(logits: Tensor, targets: Tensor, weights: Tensor) -> Spec:
    rows_fit("cross_entropy_rows", logits, targets, weights)
    return Spec(())


@kernel
def _target_row(x, target):
    """−ln softmax(x)[target], and whether x[target] is the greatest."""
    top, total = _top_and_sum(x)
    return np.log(np.float64(total)) - np.float64(x[target] - top), x[target] == top


@parallel
def _cross_entropy_rows(out, n_right, x, targets, weights, terms, right):
    for i in prange(x.shape[0]):
        loss, is_right = _target_row(x[i], targets[i])
        terms[i] = weights[i] * loss
        right[i] = is_right and weights[i] != 0
    _sum(out, terms, 1)
    _sum(n_right, right, 1)


def cross_entropies(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(n,) float64 −ln softmax(row)[target] of logits (n, n_vocab) float32, targets (n,) int32."""
    losses, right = np.empty((2, len(targets)))
    ones, sums = np.ones(len(targets), np.float32), np.empty((2, 1), np.float32)
    _cross_entropy_rows(*sums, logits, targets, ones, losses, right)
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


def _check_then_run(call: Call, targets: np.ndarray, n_vocab: int) -> None:
    """Check the targets, then run a kernel that uses them as indices."""
    expect_targets(targets, n_vocab)
    call()


def _cross_entropy_rows_run(site: Site) -> Call:
    x, targets, weights = site.src
    sums = (site.out.reshape(1), site.saved[0].reshape(1))
    rows = site.scratch.view(np.float64).reshape(2, -1)
    call = Call(_cross_entropy_rows, *sums, x, targets, weights, *rows)
    return Call(_check_then_run, call, targets, x.shape[1])


def _cross_entropy_rows_ref(
    logits: np.ndarray, targets: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    losses = -log_softmax(logits)[np.arange(len(targets)), targets]
    return np.asarray(np.sum(weights * losses))


def _cross_entropy_rows_grad(node: Tensor, d: Tensor) -> tuple[Tensor | None, ...]:
    """dlogits_i = dy · weight_i · (softmax(logits_i) - target_i)"""
    return cross_entropy_rows_back(d, *node.src), None, None


def cross_entropy_rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n, n_vocab in [(1, 2), (4, 50), (7, 33)]:
        targets = rng.integers(0, n_vocab, n, np.int32)
        weights = rng.uniform(0, 1, n) * (rng.uniform(0, 1, n) < 0.8)  # some rows do not count
        yield Sample((3 * rng.standard_normal((n, n_vocab)), targets, weights))


CROSS_ENTROPY_ROWS = op(
    name="cross_entropy_rows",
    ggml=GGMLOp.CUSTOM,
    spec=_cross_entropy_rows_spec,
    ref=_cross_entropy_rows_ref,
    grad=_cross_entropy_rows_grad,
    samples=cross_entropy_rows_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    saved=lambda *_: (Spec(()),),
    costly=True,
)
cpu_kernel(CROSS_ENTROPY_ROWS, _cross_entropy_rows_run, scratch=_row_sums(2))

# -- cross_entropy_rows_back --------------------------------------------------------------------


def _cross_entropy_rows_back_spec(
    d: Tensor, logits: Tensor, targets: Tensor, weights: Tensor
) -> Spec:
    expect("cross_entropy_rows_back", "d", d, ())
    rows_fit("cross_entropy_rows_back", logits, targets, weights)
    return Spec(logits.shape)


@parallel
def _cross_entropy_rows_back(dx, d, x, targets, weights):
    for i in prange(x.shape[0]):
        share = weights[i] * d[0]
        _row_back(dx[i], x[i], share)
        dx[i, targets[i]] -= share


def _cross_entropy_rows_back_run(site: Site) -> Call:
    d, x, targets, weights = site.src
    arguments = (site.out, d.reshape(1), x, targets, weights)
    return Call(_check_then_run, Call(_cross_entropy_rows_back, *arguments), targets, x.shape[1])


def _cross_entropy_rows_back_ref(
    d: np.ndarray, logits: np.ndarray, targets: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    dx = np.exp(log_softmax(logits))
    dx[np.arange(len(targets)), targets] -= 1
    return np.asarray(d * weights[:, None] * dx)


CROSS_ENTROPY_ROWS_BACK = op(
    name="cross_entropy_rows_back",
    ggml=GGMLOp.CUSTOM,
    spec=_cross_entropy_rows_back_spec,
    ref=_cross_entropy_rows_back_ref,
    grad=_SECOND_ORDER,
    samples=_with_d(cross_entropy_rows_samples),
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
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


def _compute(out: np.ndarray, x: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
    expect_targets(targets, x.shape[1])
    np.multiply(weights, cross_entropies(x, targets), out=out, casting="same_kind")


def _run(site: Site) -> Call:
    return Call(_compute, site.out, *site.src)


def _ref(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(-weights * log_softmax(logits)[np.arange(len(targets)), targets])


def _grad(node: Tensor, d: Tensor) -> tuple[Tensor | None, ...]:
    """dlogits_i = dy_i · weight_i · (softmax(logits_i) - target_i)

    This is cross_entropy_rows_back with each row's weight multiplied by its d.
    """
    logits, targets, weights = node.src
    one = leaf(np.ones((), np.float32))
    return cross_entropy_rows_back(one, logits, targets, mul(weights, d)), None, None


CROSS_ENTROPY_BY_ROW = op(
    name="cross_entropy_by_row",
    ggml=GGMLOp.CUSTOM,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=cross_entropy_rows_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    costly=True,
)
cpu_kernel(CROSS_ENTROPY_BY_ROW, _run)
