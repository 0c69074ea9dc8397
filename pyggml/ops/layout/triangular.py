"""Triangular and diagonal matrices, and tensors of one value.

tri          x on one side of the diagonal, with or without it; 0 elsewhere
solve_tri    X of A X = B, A lower triangular
solve_tri_t  X of Aᵀ X = B, its transpose
diag         a vector on the diagonal of a matrix of zeros
diag_back    the diagonal of a matrix
fill         one number everywhere
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.expression import Expression
from pyggml.formulas.formula import formula
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op, over_first
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.formulas import by_formula
from pyggml.kernels.kernel import Site, as_rows, cpu_kernel
from pyggml.ops.arithmetic.arith import neg
from pyggml.ops.expect import expect_gapless, expect_type
from pyggml.ops.product.matmul import mul_mat

# Kind -> the first and the last diagonal that is kept, as column − row.
_FAR = 1 << 30
_KINDS = {
    "upper_diag": (0, _FAR),
    "upper": (1, _FAR),
    "lower_diag": (-_FAR, 0),
    "lower": (-_FAR, -1),
}


def tri(x: Tensor, kind: str) -> Tensor:
    """A triangle of each matrix of x (..., n, n) F32, 0 elsewhere (ggml's TRI).

    kind: upper_diag, upper (without the diagonal), lower_diag or lower. Raises ShapeError.
    """
    return TRI(x, kind=kind)


def solve_tri(a: Tensor, b: Tensor) -> Tensor:
    """X (..., n, m) of A X = B, a (..., n, n) lower triangular, b (..., n, m), F32 (SOLVE_TRI).

    Elements above a's diagonal are not read. A zero on the diagonal gives infinities.
    """
    return SOLVE_TRI(a, b)


def diag(x: Tensor) -> Tensor:
    """(..., 1, n) F32 to (..., n, n): each row as the diagonal of a matrix (ggml's DIAG)."""
    return DIAG(x)


def fill(x: Tensor, value: float) -> Tensor:
    """A tensor of x's shape, F32, with one value in it (ggml's FILL)."""
    return FILL(x, value=float(value))


def fill_inplace(x: Tensor, value: float) -> Tensor:
    """One value written over x; returns the view of x that holds it (ggml_fill_inplace).

    Raises ShapeError if x is a view with gaps.
    """
    expect_gapless("fill_inplace", "x", x)
    return over_first(FILL(x, value=float(value)))


def _square(name: str, x: Tensor) -> None:
    expect_type(name, "x", x)
    if len(x.shape) < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"{name}: x is {x!r}, wanted square matrices")


def _matrices(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1, *a.shape[-2:])


# -- tri ----------------------------------------------------------------------------------------


@kernel
def _tri(out, x, first, last):
    n = x.shape[1]
    for i in range(x.shape[0]):
        row = i % n
        for c in range(n):
            out[i, c] = x[i, c] if first <= c - row <= last else 0


def _tri_run(site: Site) -> Call:
    return Call(_tri, as_rows(site.out), as_rows(site.src[0]), *_KINDS[site.node.params["kind"]])


def _tri_spec(x: Tensor, kind: str) -> Spec:
    _square("tri", x)
    if kind not in _KINDS:
        raise ShapeError(f"tri: kind is {kind!r}, known are {', '.join(_KINDS)}")
    return Spec(x.shape)


def _tri_ref(x: np.ndarray, kind: str) -> np.ndarray:
    triangle = np.tril if kind.startswith("lower") else np.triu
    offset = 0 if kind.endswith("_diag") else -1 if kind == "lower" else 1
    return triangle(x, offset)


def _tri_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy in the same triangle"""
    return (tri(dy, node.params["kind"]),)


def _tri_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for kind in _KINDS:
        for shape in [(1, 1), (5, 5), (2, 3, 4, 4)]:
            yield Sample((rng.standard_normal(shape),), {"kind": kind})


TRI = op(
    name="tri",
    ggml=GGMLOp.TRI,
    spec=_tri_spec,
    ref=_tri_ref,
    grad=_tri_grad,
    samples=_tri_samples,
    refuses={"kind": ("sideways",)},
    memory=Memory.INPLACE,
)
cpu_kernel(TRI, _tri_run)

# -- solve_tri, solve_tri_t ---------------------------------------------------------------------


@kernel
def _solve_row(x, a, i, solved):
    """x[i] = (x[i] − Σ a[i, t] x[t]) / a[i, i], summed over the rows t of `others`."""
    row = x[i]
    for t in solved:
        factor, solution = a[i, t], x[t]
        for j in range(row.size):
            row[j] -= factor * solution[j]
    for j in range(row.size):
        row[j] /= a[i, i]


@kernel
def _solve(out, a, b, transposed):
    n = a.shape[1]
    for m in range(a.shape[0]):
        x = out[m]
        for i in range(n):
            for j in range(x.shape[1]):
                x[i, j] = b[m, i, j]
        for step in range(n):
            if transposed:
                i = n - 1 - step
                _solve_row(x, a[m].T, i, range(i + 1, n))
            else:
                _solve_row(x, a[m], step, range(step))


def _solve_run(transposed: bool, site: Site) -> Call:
    a, b = site.src
    return Call(_solve, _matrices(site.out), _matrices(a), _matrices(b), transposed)


def _solve_spec(a: Tensor, b: Tensor) -> Spec:
    _square("solve_tri", a)
    expect_type("solve_tri", "b", b)
    if a.shape[:-1] != b.shape[:-1]:
        raise ShapeError(f"solve_tri: a is {a!r} and b {b!r}, wanted (..., n, n) and (..., n, m)")
    return Spec(b.shape)


def _solve_grad(node: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
    """dB = A⁻ᵀ·dX, dA = -dB·Xᵀ in the lower triangle"""
    db = SOLVE_TRI_T(node.src[0], dx)
    return neg(tri(mul_mat(node, db), "lower_diag")), db


def _solve_t_grad(node: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
    """dB = A⁻¹·dX, dA = -X·dBᵀ in the lower triangle"""
    db = solve_tri(node.src[0], dx)
    return neg(tri(mul_mat(db, node), "lower_diag")), db


def _solve_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for *batch, n, m in [(1, 1), (5, 3), (2, 4, 4), (2, 3, 6, 1)]:
        a = 0.3 * rng.standard_normal((*batch, n, n)) + 2 * np.eye(n)
        yield Sample((a, rng.standard_normal((*batch, n, m))))


SOLVE_TRI = op(
    name="solve_tri",
    ggml=GGMLOp.SOLVE_TRI,
    spec=_solve_spec,
    ref=lambda a, b: np.asarray(np.linalg.solve(np.tril(a), b)),
    grad=_solve_grad,
    samples=_solve_samples,
    costly=True,
)
cpu_kernel(SOLVE_TRI, partial(_solve_run, False))
SOLVE_TRI_T = op(
    name="solve_tri_t",
    spec=_solve_spec,
    ref=lambda a, b: np.asarray(np.linalg.solve(np.swapaxes(np.tril(a), -1, -2), b)),
    grad=_solve_t_grad,
    samples=_solve_samples,
    costly=True,
)
cpu_kernel(SOLVE_TRI_T, partial(_solve_run, True))

# -- diag ---------------------------------------------------------------------------------------


@kernel
def _diag(out, x):
    n = x.shape[1]
    for m in range(x.shape[0]):
        for i in range(n):
            for j in range(n):
                out[m, i, j] = 0
            out[m, i, i] = x[m, i]


@kernel
def _diag_back(out, dy):
    for m in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[m, i] = dy[m, i, i]


def _diag_spec(x: Tensor) -> Spec:
    expect_type("diag", "x", x)
    if len(x.shape) < 2 or x.shape[-2] != 1:
        raise ShapeError(f"diag: x is {x!r}, wanted (..., 1, n)")
    return Spec((*x.shape[:-2], x.shape[-1], x.shape[-1]))


def _diag_back_spec(dy: Tensor) -> Spec:
    _square("diag_back", dy)
    return Spec((*dy.shape[:-2], 1, dy.shape[-1]))


def _diag_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = the diagonal of dy"""
    return (DIAG_BACK(dy),)


def _diag_back_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy on the diagonal"""
    return (diag(dy),)


def _diag_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (1, 5), (2, 3, 1, 4)]:
        yield Sample((rng.standard_normal(shape),))


def _diag_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (5, 5), (2, 3, 4, 4)]:
        yield Sample((rng.standard_normal(shape),))


DIAG = op(
    name="diag",
    ggml=GGMLOp.DIAG,
    spec=_diag_spec,
    ref=lambda x: x * np.eye(x.shape[-1]),
    grad=_diag_grad,
    samples=_diag_samples,
)
cpu_kernel(DIAG, lambda site: Call(_diag, _matrices(site.out), as_rows(site.src[0])))
DIAG_BACK = op(
    name="diag_back",
    spec=_diag_back_spec,
    ref=lambda dy: np.diagonal(dy, axis1=-2, axis2=-1)[..., None, :].copy(),
    grad=_diag_back_grad,
    samples=_diag_back_samples,
)
cpu_kernel(DIAG_BACK, lambda site: Call(_diag_back, as_rows(site.out), _matrices(site.src[0])))

# -- fill ---------------------------------------------------------------------------------------


def _fill(x: Expression, *, value: Expression) -> Expression:
    return value


def _fill_spec(x: Tensor, value: float) -> Spec:
    expect_type("fill", "x", x)
    return Spec(x.shape)


def _fill_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, value in [((1,), 0.0), ((3, 8), -2.5)]:
        yield Sample((rng.standard_normal(shape),), {"value": value})


FILL = op(
    name="fill",
    ggml=GGMLOp.FILL,
    spec=_fill_spec,
    ref=lambda x, value: np.full(x.shape, value),
    grad=NoGrad("a constant does not depend on the tensor whose shape it takes"),
    samples=_fill_samples,
    refuses={"value": ()},
    memory=Memory.INPLACE,
)
cpu_kernel(FILL, by_formula(formula(_fill)))
