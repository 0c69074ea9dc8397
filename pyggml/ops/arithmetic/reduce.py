"""Reductions, and sorting.

sum        all elements to one                      sum_rows, mean   each row to one, axis kept
cumsum     y_j = Σ_{k<=j} x_k along rows            cumsum_back      dx_j = Σ_{k>=j} dy_k
argmax     index of each row's first maximum        count_equal      how many integers are equal
argsort    the indices that put a row in rising or falling order
top_k      the indices of its k largest numbers, the largest first

Sums and means are computed in float64, as in ggml. Equal numbers keep their order. argsort puts NaN
last; top_k takes a NaN only from the first k numbers. An order does not change smoothly, so
gradients end there.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.formula import formula
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32, I64
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, as_rows, cpu_kernel, rows
from pyggml.kernels.rows import by_row, call_by_row
from pyggml.ops import formulas
from pyggml.ops.arithmetic.arith import scale
from pyggml.ops.expect import expect, expect_type
from pyggml.ops.layout.repeat import repeat

_HALF = np.float32(0.5)


def sum_(x: Tensor) -> Tensor:
    """The sum of all elements of x F32, shape () (ggml's SUM)."""
    return SUM(x)


def sum_rows(x: Tensor) -> Tensor:
    """(..., n) F32 to (..., 1): the sum of each row (ggml's SUM_ROWS)."""
    return SUM_ROWS(x)


def mean(x: Tensor) -> Tensor:
    """(..., n) F32 to (..., 1): the mean of each row (ggml's MEAN)."""
    return MEAN(x)


def cumsum(x: Tensor) -> Tensor:
    """Running sums along the last axis of x F32 (ggml's CUMSUM)."""
    return CUMSUM(x)


def argmax(x: Tensor) -> Tensor:
    """(..., n) F32 to (...) I32: the index of each row's maximum, the first of equals (ARGMAX)."""
    return ARGMAX(x)


def count_equal(a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
    """How many elements of two I32 tensors of one shape are equal, I64 of shape () (COUNT_EQUAL).

    With a mask of that shape, F32, only elements where it is above 1/2 count.
    """
    return COUNT_EQUAL(a, b, *(() if mask is None else (mask,)))


def _expect_rows(name: str, x: Tensor) -> None:
    expect_type(name, "x", x)
    if not x.shape or x.shape[-1] == 0:
        raise ShapeError(f"{name}: x is {x!r}, wanted rows of one or more elements")


def _row_spec(name: str, x: Tensor) -> Spec:
    _expect_rows(name, x)
    return Spec((*x.shape[:-1], 1))


def _same_spec(name: str, x: Tensor) -> Spec:
    _expect_rows(name, x)
    return Spec(x.shape)


def _per_row(code: Callable[..., None], site: Site) -> Call:
    """Call code(out, x) with x as rows, and one element of out for each row."""
    return Call(code, site.out.reshape(-1), as_rows(site.src[0]))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5), (70,)]:
        yield Sample((rng.standard_normal(shape),))


# -- sum ----------------------------------------------------------------------------------------


_TOTAL, _MEAN = formula(formulas.sum_rows), formula(formulas.mean_of_row)


def _sum_spec(x: Tensor) -> Spec:
    expect_type("sum", "x", x)
    return Spec(())


def _sum_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx_i = dy"""
    return (repeat(dy, node.src[0].shape),)


SUM = op(
    name="sum",
    ggml=GGMLOp.SUM,
    spec=_sum_spec,
    ref=lambda x: np.asarray(x.sum()),
    grad=_sum_grad,
    samples=_samples,
    halves=True,
)
cpu_kernel(SUM, lambda site: call_by_row(_TOTAL, [site.out], [site.src[0].reshape(-1)]))

# -- sum_rows, mean -----------------------------------------------------------------------------


SUM_ROWS = op(
    name="sum_rows",
    ggml=GGMLOp.SUM_ROWS,
    spec=partial(_row_spec, "sum_rows"),
    ref=_TOTAL,
    formula=_TOTAL,
    grad=_sum_grad,
    samples=_samples,
)
cpu_kernel(SUM_ROWS, by_row(_TOTAL))


def _mean_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx_i = dy / n"""
    (x,) = node.src
    return (repeat(scale(dy, 1.0 / x.shape[-1]), x.shape),)


MEAN = op(
    name="mean",
    ggml=GGMLOp.MEAN,
    spec=partial(_row_spec, "mean"),
    ref=_MEAN,
    formula=_MEAN,
    grad=_mean_grad,
    samples=_samples,
)
cpu_kernel(MEAN, by_row(_MEAN))

# -- cumsum -------------------------------------------------------------------------------------


@kernel
def _cumsum(out, x):
    for i in range(x.shape[0]):
        total = np.float32(0)
        for j in range(x.shape[1]):
            total += x[i, j]
            out[i, j] = total


@kernel
def _cumsum_back(out, dy):
    n = dy.shape[1]
    for i in range(dy.shape[0]):
        total = np.float32(0)
        for j in range(n):
            total += dy[i, n - 1 - j]
            out[i, n - 1 - j] = total


def _rows_run(code: Callable[..., None], site: Site) -> Call:
    return Call(code, as_rows(site.out), as_rows(site.src[0]))


def _cumsum_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx_i = Σ_j≥i dy_j"""
    return (CUMSUM_BACK(dy),)


CUMSUM = op(
    name="cumsum",
    ggml=GGMLOp.CUMSUM,
    spec=partial(_same_spec, "cumsum"),
    ref=lambda x: np.cumsum(x, axis=-1),
    grad=_cumsum_grad,
    samples=_samples,
    memory=Memory.INPLACE,
)
cpu_kernel(CUMSUM, partial(_rows_run, _cumsum))


def _cumsum_back_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx_i = Σ_j≤i dy_j"""
    return (cumsum(dy),)


CUMSUM_BACK = op(
    name="cumsum_back",
    spec=partial(_same_spec, "cumsum_back"),
    ref=lambda dy: np.cumsum(dy[..., ::-1], axis=-1)[..., ::-1],
    grad=_cumsum_back_grad,
    samples=_samples,
    memory=Memory.INPLACE,
)
cpu_kernel(CUMSUM_BACK, partial(_rows_run, _cumsum_back))

# -- argmax, count_equal ------------------------------------------------------------------------


@kernel
def _argmax(out, x):
    for i in range(x.shape[0]):
        best = 0
        for j in range(1, x.shape[1]):
            if x[i, j] > x[i, best]:
                best = j
        out[i] = best


def _argmax_spec(x: Tensor) -> Spec:
    _expect_rows("argmax", x)
    return Spec(x.shape[:-1], I32)


ARGMAX = op(
    name="argmax",
    ggml=GGMLOp.ARGMAX,
    spec=_argmax_spec,
    ref=lambda x: np.asarray(x.argmax(axis=-1)),
    grad=NoGrad("a position does not change smoothly"),
    samples=_samples,
)
cpu_kernel(ARGMAX, partial(_per_row, _argmax))


@kernel
def _count_equal(out, a, b, mask):
    total = 0
    for i in range(a.size):
        total += a[i] == b[i] and mask[i % mask.size] > _HALF
    out[0] = total


def _count_equal_run(site: Site) -> Call:
    arrays = [a.reshape(-1) for a in (site.out, *site.src)]
    return Call(_count_equal, *(arrays if len(arrays) > 3 else [*arrays, np.ones(1, np.float32)]))


def _count_equal_spec(a: Tensor, b: Tensor, *mask: Tensor) -> Spec:
    expect_type("count_equal", "a", a, I32)
    expect("count_equal", "b", b, a.shape, I32)
    for m in mask:
        expect("count_equal", "mask", m, a.shape)
    return Spec((), I64)


def _count_equal_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1,), (3, 8), (40,)]:
        pair = tuple(rng.integers(0, 3, shape).astype(np.int32) for _ in range(2))
        yield Sample(pair)
        yield Sample((*pair, rng.uniform(0, 1, shape)))


COUNT_EQUAL = op(
    name="count_equal",
    ggml=GGMLOp.COUNT_EQUAL,
    spec=_count_equal_spec,
    ref=lambda a, b, *mask: np.asarray(np.sum((a == b) & (mask[0] > 0.5 if mask else True))),
    grad=NoGrad("a count does not change smoothly"),
    samples=_count_equal_samples,
)
cpu_kernel(COUNT_EQUAL, _count_equal_run)

# -- argsort, top_k -------------------------------------------------------------------------------


_NO_GRADIENT = NoGrad("the order of numbers does not change smoothly")


def argsort(x: Tensor, descending: bool = False) -> Tensor:
    """Indices (..., n) I32 that put each row of x (..., n) F32 in order (ggml's ARGSORT)."""
    return ARGSORT(x, descending=descending)


def top_k(x: Tensor, k: int) -> Tensor:
    """Indices (..., k) I32 of the k largest numbers in each row of x (..., n) F32, largest first.

    ggml's TOP_K promises no order; its argsort_top_k does. Raises ShapeError unless 1 <= k <= n.
    """
    return TOP_K(x, k=k)


# -- argsort ------------------------------------------------------------------------------------


def _argsort_spec(x: Tensor, descending: bool) -> Spec:
    expect_type("argsort", "x", x)
    return Spec(x.shape, I32)


def _argsort(out: np.ndarray, x: np.ndarray, descending: bool) -> None:
    out[...] = np.argsort(-x if descending else x, axis=-1, kind="stable")


def _argsort_ref(x: np.ndarray, descending: bool) -> np.ndarray:
    """By Python's sort, which is stable too."""
    indices = range(x.shape[-1])
    rows = (-x if descending else x).reshape(-1, x.shape[-1])
    return np.array([sorted(indices, key=row.__getitem__) for row in rows]).reshape(x.shape)


def _argsort_run(site: Site) -> Call:
    return Call(_argsort, site.out, site.src[0], site.node.params["descending"])


def _argsort_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, descending in [((1, 1), False), ((3, 40), True), ((2, 3, 5), False)]:
        yield Sample((rng.standard_normal(shape),), {"descending": descending})
    yield Sample((np.array([[2.0, 1.0, 2.0, 1.0]]),), {"descending": True})


ARGSORT = op(
    name="argsort",
    ggml=GGMLOp.ARGSORT,
    spec=_argsort_spec,
    ref=_argsort_ref,
    grad=_NO_GRADIENT,
    samples=_argsort_samples,
    refuses={"descending": ()},
)
cpu_kernel(ARGSORT, _argsort_run)

# -- top_k --------------------------------------------------------------------------------------


def _top_k_spec(x: Tensor, k: int) -> Spec:
    expect_type("top_k", "x", x)
    n = x.shape[-1] if x.shape else 0
    if not 1 <= k <= n:
        raise ShapeError(f"top_k: k is {k}, wanted 1 to the {n} numbers of a row of {x!r}")
    return Spec((*x.shape[:-1], k), I32)


@kernel
def _top_k(out, x, k):
    """Insertion: each number moves before the smaller of the k largest so far."""
    for r in range(x.shape[0]):
        row, chosen = x[r], out[r]
        for j in range(row.size):
            at = min(j, k)
            while at > 0 and row[j] > row[chosen[at - 1]]:
                if at < k:
                    chosen[at] = chosen[at - 1]
                at -= 1
            if at < k:
                chosen[at] = j


def _top_k_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), 1), ((7, 40), 4), ((2, 3, 5), 5), ((6, 9), 1)]
    for shape, k in [*cases, ((5, 33), int(rng.integers(1, 34)))]:
        yield Sample((rng.standard_normal(shape),), {"k": k})
    yield Sample((np.array([[1.0, 2.0, 2.0, 2.0, 0.0]]),), {"k": 2})


TOP_K = op(
    name="top_k",
    ggml=GGMLOp.TOP_K,
    spec=_top_k_spec,
    ref=lambda x, k: _argsort_ref(x, True)[..., :k],
    grad=_NO_GRADIENT,
    samples=_top_k_samples,
    refuses={"k": (0, -1, 999)},
)
cpu_kernel(TOP_K, rows(_top_k))
