"""Arithmetic of two tensors; the second is repeated to the first's shape (ggml's broadcasting).

add   a + b        sub   a - b        mul   a · b        div   a / b
add1  a + b of one element            scale   s · x + b with numbers s and b      neg   -x

F16 and BF16 are computed as F32, and the result is of a's type (Op.halves).
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.formula import Formula, formula
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.op import GradRule, Memory, Op, Sample, Spec, op, over_first
from pyggml.graph.tensor import MAX_AXES, Shape, Tensor
from pyggml.kernels.formulas import by_formula, by_rows
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops import formulas
from pyggml.ops.arithmetic.broadcast import copies, drawn_tiles, expect_tiles, four_axes, tile_to
from pyggml.ops.by_formula import Samples, draws, formula_op
from pyggml.ops.expect import expect, expect_gapless, expect_type


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, F32, of a's shape; b is repeated to it (ggml's ADD)."""
    return ADD(a, b)


def add_inplace(a: Tensor, b: Tensor) -> Tensor:
    """a + b written over a; returns the view of a that holds it (ggml_add_inplace).

    Other readers of a must come before this node. Raises ShapeError if a is a view with gaps.
    """
    expect_type("add_inplace", "a", a)
    expect_gapless("add_inplace", "a", a)
    return over_first(ADD(a, b))


def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b, F32, of a's shape; b is repeated to it (ggml's SUB)."""
    return SUB(a, b)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a · b element by element, F32, of a's shape; b is repeated to it (ggml's MUL)."""
    return MUL(a, b)


def div(a: Tensor, b: Tensor) -> Tensor:
    """a / b element by element, F32, of a's shape; b is repeated to it (ggml's DIV)."""
    return DIV(a, b)


def add1(a: Tensor, b: Tensor) -> Tensor:
    """a + the one element of b, F32 (ggml's ADD1)."""
    return ADD1(a, b)


def scale(x: Tensor, s: float, b: float = 0.0) -> Tensor:
    """s · x + b, F32 (ggml's SCALE)."""
    return SCALE(x, s=float(s), b=float(b))


def neg(x: Tensor) -> Tensor:
    """-x, F32 (ggml's unary NEG)."""
    return NEG(x)


def _binary_spec(name: str, a: Tensor, b: Tensor) -> Spec:
    expect_type(name, "a", a)
    expect(name, "b", b, b.shape)
    expect_tiles(name, "b", b, a.shape)
    return Spec(a.shape)


def _broadcast(formula: Formula, ufunc: np.ufunc) -> Callable[[Site], Call]:
    """The formula's kernel for equal sizes, and where row r takes b's row r % m, as of a vector.
    Columns and tiles go to NumPy's `ufunc`."""
    alike = by_formula(formula)

    def run(site: Site) -> Call:
        out, (a, b) = site.out, site.src
        if a.size == b.size:
            return alike(site)
        if not _cycles(a.shape, b.shape):
            return Call(_quietly, ufunc, *_side_by_side(out, a, b))
        return by_rows(formula, site)

    return run


def _cycles(large: Shape, small: Shape) -> bool:
    """Whether row r of the larger takes row r % m of the smaller, which has m rows."""
    pairs = zip(four_axes(large), four_axes(small), strict=True)
    last = max((i for i, (n, m) in enumerate(pairs) if n != m), default=0)
    return last < MAX_AXES - 1 and prod(four_axes(small)[:last]) == 1


def _side_by_side(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
    """Views with each axis split in two: how often b is repeated along it, and b's size."""
    split = [k for axis in copies(b.shape, a.shape) for k in axis]
    single = [k for m in four_axes(b.shape) for k in (1, m)]
    return out.reshape(split), a.reshape(split), b.reshape(single)


def _quietly(ufunc: np.ufunc, out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    with np.errstate(all="ignore"):  # infinity and NaN are results, as in kernels
        ufunc(a, b, out=out)


def _pairs(rng: np.random.Generator) -> Iterator[Sample]:
    shapes = [
        *(((1, 1), (1, 1)), ((3, 8), (3, 8)), ((2, 3, 5), (5,)), ((4, 5), (4, 1)), ((), ())),
        *(
            ((2, 4, 3, 6), (2, 1, 3)),
            ((2, 3, 4), (1,)),
            ((4, 1, 6), (2, 1, 6)),
            ((2, 3, 8), (2, 1, 8)),
            ((7,), (1, 1, 7)),
            ((71, 65), (65,)),  # more than a task's share
            drawn_tiles(rng),
        ),
    ]
    for a, b in shapes:
        magnitude = rng.uniform(0.5, 2.0, b)  # no divisor near 0
        sign = rng.choice([-1.0, 1.0], b)
        yield Sample((rng.standard_normal(a), np.asarray(magnitude * sign)))


def _binary(
    function: Callable[..., Any],
    ufunc: np.ufunc,
    ggml: GGMLOp,
    grad: GradRule,
    spec: Callable[..., Spec] | None = None,
    samples: Samples = _pairs,
) -> Op:
    """Declare the formula of a and b, which is repeated to a's shape."""
    of = formula(function)
    new = op(
        name=of.name,
        ggml=ggml,
        spec=spec or partial(_binary_spec, of.name),
        ref=lambda a, b: of(a, tile_to(b, a.shape)),
        grad=grad,
        samples=samples,
        memory=Memory.INPLACE,
        formula=of,
        halves=True,
    )
    cpu_kernel(new, _broadcast(of, ufunc))
    return new


def _add_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy, db = dy"""
    return dy, dy


def _sub_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy, db = -dy"""
    return dy, neg(dy)


def _mul_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy · b, db = dy · a"""
    a, b = node.src
    return mul(dy, b), mul(dy, a)


def _div_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy / b, db = -dy · y / b"""
    _, b = node.src
    return div(dy, b), neg(div(mul(dy, node), b))


def _add1_spec(a: Tensor, b: Tensor) -> Spec:
    expect_type("add1", "a", a)
    expect_type("add1", "b", b)
    if b.n_elements != 1:
        raise ShapeError(f"add1: b is {b!r}, wanted one element")
    return Spec(a.shape)


def _add1_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for a, b in [((1, 1), (1,)), ((3, 8), (1, 1)), ((2, 3, 5), ())]:
        yield Sample((rng.standard_normal(a), np.asarray(rng.standard_normal(b))))


ADD = _binary(formulas.add, np.add, GGMLOp.ADD, _add_grad)
SUB = _binary(formulas.sub, np.subtract, GGMLOp.SUB, _sub_grad)
MUL = _binary(formulas.mul, np.multiply, GGMLOp.MUL, _mul_grad)
DIV = _binary(formulas.div, np.divide, GGMLOp.DIV, _div_grad)
ADD1 = _binary(formulas.add1, np.add, GGMLOp.ADD1, _add_grad, _add1_spec, _add1_samples)


def _scale_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = s · dy"""
    return (scale(dy, node.params["s"]),)


def _scale_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, s, b in [((1, 1), 2.0, 0.0), ((3, 8), -0.5, 1.25), ((2, 3, 5), 0.0, -1.0)]:
        yield Sample((rng.standard_normal(shape),), {"s": s, "b": b})


def _neg_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = -dy"""
    return (neg(dy),)


SCALE = formula_op(
    formulas.scale, GGMLOp.SCALE, _scale_samples, {"s": (), "b": ()}, grad=_scale_grad
)
NEG = formula_op(formulas.neg, GGMLUnaryOp.NEG, draws(0, 2), grad=_neg_grad)
