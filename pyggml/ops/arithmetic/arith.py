"""Arithmetic of two tensors; the second is repeated to the first's shape (ggml's broadcasting).

add   a + b        sub   a - b        mul   a · b        div   a / b
add1  a + b of one element            scale   s · x + b with numbers s and b      neg   -x

F16 and BF16 are computed as F32, and the result is of a's type (Op.halves).
"""

from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.op import NO_SETTINGS, Memory, Sample, Spec, op
from pyggml.graph.tensor import MAX_AXES, Shape, Tensor
from pyggml.jit import ALONE, kernel, parallel, prange
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.arithmetic.broadcast import copies, drawn_tiles, expect_tiles, four_axes, tile_to
from pyggml.ops.expect import expect, expect_gapless, expect_type
from pyggml.ops.strips import strip, strips


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, F32, of a's shape; b is repeated to it (ggml's ADD)."""
    return ADD(a, b)


def add_inplace(a: Tensor, b: Tensor) -> Tensor:
    """a + b written over a; returns the view of a that holds it (ggml_add_inplace).

    Other readers of a must come before this node. Raises ShapeError if a is a view with gaps.
    """
    expect_type("add_inplace", "a", a)
    expect_gapless("add_inplace", "a", a)
    node = ADD(a, b)
    node.base, node.offset = a.root, a.offset
    return node


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


def _binary_spec(name: str) -> Callable[..., Spec]:
    def spec(a: Tensor, b: Tensor) -> Spec:
        expect_type(name, "a", a)
        expect(name, "b", b, b.shape)
        expect_tiles(name, "b", b, a.shape)
        return Spec(a.shape)

    return spec


def _broadcast(
    ufunc: np.ufunc, code: Callable[..., None] | None = None, *constants: np.float32
) -> Callable[[Site], Call]:
    """Call code(out, a, b, *constants) on (n_rows, n) twice and (m, n): row r takes b's row r % m.

    Equal shapes and vectors have this form. Columns and tiles do not, and go to NumPy's `ufunc`.
    """

    def run(site: Site) -> Call:
        out, (a, b) = site.out, site.src
        if code is None or not _cycles(a.shape, b.shape):
            return Call(_quietly, ufunc, *_side_by_side(out, a, b))
        n = strip(a.shape) if a.size == b.size else a.shape[-1]
        return Call(code, *(x.reshape(-1, n) for x in (out, a, b)), *constants)

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
            ((71, 65), (65,)),  # more than ALONE
            drawn_tiles(rng),
        ),
    ]
    for a, b in shapes:
        magnitude = rng.uniform(0.5, 2.0, b)  # no divisor near 0
        sign = rng.choice([-1.0, 1.0], b)
        yield Sample((rng.standard_normal(a), np.asarray(magnitude * sign)))


# -- add, sub -----------------------------------------------------------------------------------


@kernel
def _add_row(out, a, b, sign):
    for c in range(out.size):
        out[c] = a[c] + sign * b[c]


@parallel
def _add(out, a, b, sign):
    if out.size <= ALONE:
        for r in range(out.shape[0]):
            _add_row(out[r], a[r], b[r % b.shape[0]], sign)
    else:
        for r in prange(out.shape[0]):
            _add_row(out[r], a[r], b[r % b.shape[0]], sign)


def _add_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a + tile_to(b, a.shape))


def _add_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy, db = dy"""
    return dy, dy


ADD = op(
    name="add",
    ggml=GGMLOp.ADD,
    spec=_binary_spec("add"),
    ref=_add_ref,
    grad=_add_grad,
    samples=_pairs,
    refuses=NO_SETTINGS,
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(ADD, _broadcast(np.add, _add, np.float32(1)))


def _sub_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a - tile_to(b, a.shape))


def _sub_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy, db = -dy"""
    return dy, neg(dy)


SUB = op(
    name="sub",
    ggml=GGMLOp.SUB,
    spec=_binary_spec("sub"),
    ref=_sub_ref,
    grad=_sub_grad,
    samples=_pairs,
    refuses=NO_SETTINGS,
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(SUB, _broadcast(np.subtract, _add, np.float32(-1)))


def _add1_spec(a: Tensor, b: Tensor) -> Spec:
    expect_type("add1", "a", a)
    expect_type("add1", "b", b)
    if b.n_elements != 1:
        raise ShapeError(f"add1: b is {b!r}, wanted one element")
    return Spec(a.shape)


def _add1_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a + b.item())


def _add1_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for a, b in [((1, 1), (1,)), ((3, 8), (1, 1)), ((2, 3, 5), ())]:
        yield Sample((rng.standard_normal(a), np.asarray(rng.standard_normal(b))))


ADD1 = op(
    name="add1",
    ggml=GGMLOp.ADD1,
    spec=_add1_spec,
    ref=_add1_ref,
    grad=_add_grad,
    samples=_add1_samples,
    refuses=NO_SETTINGS,
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(ADD1, _broadcast(np.add, _add, np.float32(1)))

# -- mul ----------------------------------------------------------------------------------------


@parallel
def _mul(out, a, b):
    for r in prange(out.shape[0]):
        k = r % b.shape[0]
        for c in range(out.shape[1]):
            out[r, c] = a[r, c] * b[k, c]


def _mul_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a * tile_to(b, a.shape))


def _mul_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy · b, db = dy · a"""
    a, b = node.src
    return mul(dy, b), mul(dy, a)


MUL = op(
    name="mul",
    ggml=GGMLOp.MUL,
    spec=_binary_spec("mul"),
    ref=_mul_ref,
    grad=_mul_grad,
    samples=_pairs,
    refuses=NO_SETTINGS,
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(MUL, _broadcast(np.multiply, _mul))

# -- div ----------------------------------------------------------------------------------------


def _div_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a / tile_to(b, a.shape))


def _div_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy / b, db = -dy · y / b"""
    _, b = node.src
    return div(dy, b), neg(div(mul(dy, node), b))


DIV = op(
    name="div",
    ggml=GGMLOp.DIV,
    spec=_binary_spec("div"),
    ref=_div_ref,
    grad=_div_grad,
    samples=_pairs,
    refuses=NO_SETTINGS,
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(DIV, _broadcast(np.divide))

# -- scale --------------------------------------------------------------------------------------


@parallel
def _scale(out, x, s, b):
    for r in prange(out.shape[0]):
        for c in range(out.shape[1]):
            out[r, c] = s * x[r, c] + b


def _scale_spec(x: Tensor, s: float, b: float) -> Spec:
    expect_type("scale", "x", x)
    return Spec(x.shape)


def _scale_ref(x: np.ndarray, s: float, b: float) -> np.ndarray:
    return s * x + b


def _scale_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = s · dy"""
    return (scale(dy, node.params["s"]),)


def _scale_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, s, b in [((1, 1), 2.0, 0.0), ((3, 8), -0.5, 1.25), ((2, 3, 5), 0.0, -1.0)]:
        yield Sample((rng.standard_normal(shape),), {"s": s, "b": b})


SCALE = op(
    name="scale",
    ggml=GGMLOp.SCALE,
    spec=_scale_spec,
    ref=_scale_ref,
    grad=_scale_grad,
    samples=_scale_samples,
    refuses={"s": (), "b": ()},
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(SCALE, strips(_scale))


def _neg_spec(x: Tensor) -> Spec:
    expect_type("neg", "x", x)
    return Spec(x.shape)


def _neg_run(site: Site) -> Call:
    call = strips(_scale)(site)
    return Call(call.kernel, *call.arguments, np.float32(-1), np.float32(0))


def _neg_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = -dy"""
    return (neg(dy),)


def _neg_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5)]:
        yield Sample((rng.standard_normal(shape),))


NEG = op(
    name="neg",
    ggml=GGMLUnaryOp.NEG,
    spec=_neg_spec,
    ref=np.negative,
    grad=_neg_grad,
    samples=_neg_samples,
    refuses=NO_SETTINGS,
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(NEG, _neg_run)
