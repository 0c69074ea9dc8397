"""Matrix products. A weight is (n_out, n_in), so the product with its transpose is the natural one.

mul_mat(w, x)          y  = x·wᵀ            w may be of any type, x is multiplied as float32
mul_mat_add(y, w, x)   y' = y + x·wᵀ        in y's memory, unless y is read afterwards
out_prod(a, b)         c  = bᵀ·a            gradients: dx = out_prod(w, dyᵀ), dw = out_prod(x, dy)
out_prod_add(c, a, b)  c' = c + bᵀ·a        in c's memory likewise

Leading axes are batches. As in ggml, batch i of the result takes batch i // r of a source that has
r times fewer batches.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op, widen
from pyggml.graph.tensor import Shape, Tensor
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute, Site, cpu_kernel, onto_first
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.ops.layout.layout import cont, reshape, transpose
from pyggml.ops.layout.repeat import repeat_back
from pyggml.ops.product.problem import bind, packing_of, problem_of, swap_axes


def mul_mat(w: Tensor, x: Tensor) -> Tensor:
    """x·wᵀ: w (…, N, K) of any type, x (…, T, K) F32, F16 or BF16 -> (…, T, N) F32 (ggml MUL_MAT).

    Raises ShapeError if K differs, or if the batches of w do not divide those of x.
    """
    return MUL_MAT(_walkable(w), _as_taken(w, x))


def mul_mat_add(y: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """y + x·wᵀ: y (…, T, N) F32, w and x as mul_mat takes them."""
    return MUL_MAT_ADD(y, _walkable(w), _as_taken(w, x))


def out_prod(a: Tensor, b: Tensor) -> Tensor:
    """bᵀ·a: a (…, R, M) of any type, b (…, R, N) F32, F16 or BF16 -> (…, N, M) F32 (ggml
    OUT_PROD)."""
    b = widen(b)
    if a.dtype is F32 or len(b.shape) < 2:
        return OUT_PROD(_walkable(a), _walkable(b))
    return OUT_PROD(a, b if transpose(b).is_contiguous else transpose(cont(transpose(b))))


def out_prod_add(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c + bᵀ·a: c (…, N, M) float32, a and b as out_prod takes them."""
    return OUT_PROD_ADD(c, *out_prod(a, b).src)


def _walkable(t: Tensor) -> Tensor:
    """t, or a copy if t has gaps and several batch axes: kernels walk one batch axis of F32."""
    return t if len(t.shape) <= 3 or t.is_contiguous or t.dtype is not F32 else cont(t)


def _as_taken(w: Tensor, x: Tensor) -> Tensor:
    """x as the kernel for w takes it: with a w to unpack, x has no gaps."""
    x = widen(x)
    return _walkable(x) if w.dtype is F32 else cont(x)


def _batches(name: str, few: Shape, many: Shape) -> Shape:
    """The result's leading axes: those of `many`, which those of `few` must divide."""
    if not few:
        return many
    few = (1,) * (len(many) - len(few)) + few
    if len(few) > len(many) or any(f == 0 or m % f for f, m in zip(few, many, strict=True)):
        raise ShapeError(f"{name}: batches {few} do not divide batches {many}")
    return many


def _check(name: str, weight: Tensor, x: Tensor, axis: int) -> None:
    if len(weight.shape) < 2 or len(x.shape) < 2:
        raise ShapeError(f"{name}: {weight.shape} and {x.shape}: two axes or more are needed")
    if weight.shape[axis] != x.shape[axis]:
        raise ShapeError(
            f"{name} with {weight.name or 'a matrix'}: {weight.shape} and {x.shape} differ in "
            f"the axis they are summed over ({weight.shape[axis]} and {x.shape[axis]})"
        )
    if x.dtype is not F32:
        raise ShapeError(f"{name}: the second factor is {x.dtype}, wanted F32")
    to_unpack = weight.dtype is not F32
    if to_unpack and weight.strides[-1] != weight.dtype.block_bytes:
        raise ShapeError(f"{name}: the rows of {weight!r} have gaps, wanted them whole")
    rows = x if axis == -1 else swap_axes(x)
    lies_in_columns = axis == -2 and weight.dtype is BF16 and len(x.shape) == 2 and x.is_contiguous
    if to_unpack and not (rows.is_contiguous or lies_in_columns):
        raise ShapeError(f"{name}: {x!r} has gaps beside {weight!r}, wanted a copy without")


# -- mul_mat ------------------------------------------------------------------------------------


def _mul_mat_spec(w: Tensor, x: Tensor) -> Spec:
    _check("mul_mat", w, x, axis=-1)
    return Spec((*_batches("mul_mat", w.shape[:-2], x.shape[:-2]), x.shape[-2], w.shape[-2]))


def _mul_mat_problem(node: Tensor, compute: Compute) -> gemm.Problem:
    return problem_of("mul_mat", node, node.src[-1], compute)


def _mul_mat_call(site: Site, accumulate: bool) -> Call:
    p = _mul_mat_problem(site.node, site.compute)
    return bind(site, p, site.src[-1], "mul_mat", accumulate)


def _mul_mat_run(site: Site) -> Call:
    return _mul_mat_call(site, accumulate=False)


def _mul_mat_scratch(node: Tensor, compute: Compute) -> int:
    return gemm.scratch_bytes(_mul_mat_problem(node, compute))


def _spread(few: np.ndarray, many: np.ndarray) -> np.ndarray:
    """`few` with every batch repeated until it has the batches of `many`."""
    few = few.reshape((1,) * (many.ndim - few.ndim) + few.shape)
    for axis in range(many.ndim - 2):
        few = np.repeat(few, many.shape[axis] // few.shape[axis], axis)
    return few


def _mul_mat_ref(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x @ _spread(w, x).swapaxes(-1, -2)


def _mul_mat_grad(node: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dw = dyᵀ·x, dx = dy·w"""
    w, x = node.src[-2:]
    return _sum_groups(out_prod(x, dy), w.shape), out_prod(w, transpose(dy))


def _sum_groups(dw: Tensor, shape: Shape) -> Tensor:
    """dw summed over the neighbouring batches that one batch of the weight served."""
    if dw.shape == shape:
        return dw
    full, small = dw.shape, (1,) * (len(dw.shape) - len(shape)) + shape
    for axis in (i for i in range(len(full) - 2) if full[i] != small[i]):
        outer, inner = prod(small[: axis + 1]), prod(full[axis + 1 :])
        grouped = reshape(dw, (outer, full[axis] // small[axis], inner))
        dw = repeat_back(grouped, (outer, 1, inner))
    return reshape(dw, shape)


def _mul_mat_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for t, n, k in ((1, 1, 1), (3, 5, 8), (13, 70, 33), (2, 64, 600)):
        yield Sample((rng.standard_normal((n, k)), rng.standard_normal((t, k))))
    yield Sample((rng.standard_normal((2, 5, 7)), rng.standard_normal((4, 3, 7))))
    yield Sample((rng.standard_normal((5, 7)), rng.standard_normal((2, 3, 7))))
    yield Sample((rng.standard_normal((2, 2, 5, 7)), rng.standard_normal((4, 6, 3, 7))))
    for w, x in (((3, 64), (2, 64)), ((2, 5, 32), (4, 3, 32)), ((2, 1, 5, 32), (4, 3, 2, 32))):
        yield Sample((packed_leaf(rng, w, "Q8_0"), rng.standard_normal(x)))


MUL_MAT = op(
    name="mul_mat",
    ggml=GGMLOp.MUL_MAT,
    spec=_mul_mat_spec,
    ref=_mul_mat_ref,
    grad=_mul_mat_grad,
    samples=_mul_mat_samples,
    strided=True,
    costly=True,
)
cpu_kernel(MUL_MAT, _mul_mat_run, scratch=_mul_mat_scratch, shared=packing_of)

# -- mul_mat_add --------------------------------------------------------------------------------


def _sum_spec(name: str, y: Tensor, product: Spec) -> Spec:
    if y.shape != product.shape:
        raise ShapeError(f"{name}: adds {product.shape} to {y.shape}")
    return product


def _mul_mat_add_run(site: Site) -> Call:
    return onto_first(site, _mul_mat_call(site, accumulate=True))


def _mul_mat_add_grad(node: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """da = dy, dw = dyᵀ·x, dx = dy·w"""
    return dy, *_mul_mat_grad(node, dy)


def _mul_mat_add_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for t, n, k in ((1, 1, 1), (3, 5, 8), (13, 70, 4)):
        shapes = (t, n), (n, k), (t, k)
        yield Sample(tuple(rng.standard_normal(s) for s in shapes))


MUL_MAT_ADD = op(
    name="mul_mat_add",
    spec=lambda y, w, x: _sum_spec("mul_mat_add", y, _mul_mat_spec(w, x)),
    ref=lambda y, w, x: y + _mul_mat_ref(w, x),
    grad=_mul_mat_add_grad,
    samples=_mul_mat_add_samples,
    memory=Memory.INPLACE_FIRST,
    strided=True,
    costly=True,
    fuses=("mul_mat", "add"),
)
cpu_kernel(MUL_MAT_ADD, _mul_mat_add_run, scratch=_mul_mat_scratch, shared=packing_of)

# -- out_prod -----------------------------------------------------------------------------------


def _out_prod_spec(a: Tensor, b: Tensor) -> Spec:
    _check("out_prod", a, b, axis=-2)
    return Spec((*_batches("out_prod", a.shape[:-2], b.shape[:-2]), b.shape[-1], a.shape[-1]))


def _out_prod_problem(node: Tensor, compute: Compute) -> gemm.Problem:
    return problem_of("out_prod", node, swap_axes(node.src[-1]), compute)


def _out_prod_call(site: Site, accumulate: gemm.Adds) -> Call:
    p = _out_prod_problem(site.node, site.compute)
    return bind(site, p, site.src[-1].swapaxes(-1, -2), "out_prod", accumulate)


def _out_prod_scratch(node: Tensor, compute: Compute) -> int:
    return gemm.scratch_bytes(_out_prod_problem(node, compute))


def _out_prod_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return b.swapaxes(-1, -2) @ _spread(a, b)


def _out_prod_grad(node: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """da = b·dc, db = a·dcᵀ"""
    a, b = node.src[-2:]  # c = bᵀ·a, so da = b·dc and dbᵀ = dc·aᵀ
    return _sum_groups(mul_mat(transpose(dc), b), a.shape), transpose(mul_mat(a, dc))


def _out_prod_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for r, m, n in ((1, 1, 1), (5, 8, 3), (70, 33, 13), (600, 300, 2)):
        yield Sample((rng.standard_normal((r, m)), rng.standard_normal((r, n))))
    for a, b in (((4, 5, 7), (4, 5, 3)), ((2, 5, 7), (4, 5, 3)), ((2, 1, 5, 7), (4, 3, 5, 2))):
        yield Sample((rng.standard_normal(a), rng.standard_normal(b)))
    for few, rows in (((3, 64), (2, 3)), ((2, 5, 32), (4, 3, 5)), ((2, 1, 5, 32), (4, 3, 2, 5))):
        turned = rng.standard_normal(rows).swapaxes(-1, -2)
        yield Sample((packed_leaf(rng, few, "Q8_0"), turned))
    for r, m, n in ((1, 1, 1), (70, 33, 13), (300, 48, 101)):
        yield Sample((packed_leaf(rng, (r, m), "BF16"), rng.standard_normal((r, n))))


OUT_PROD = op(
    name="out_prod",
    ggml=GGMLOp.OUT_PROD,
    spec=_out_prod_spec,
    ref=_out_prod_ref,
    grad=_out_prod_grad,
    samples=_out_prod_samples,
    strided=True,
    costly=True,
)
cpu_kernel(OUT_PROD, lambda site: _out_prod_call(site, accumulate=False), scratch=_out_prod_scratch)

# -- out_prod_add -------------------------------------------------------------------------------


def _out_prod_add_run(site: Site) -> Call:
    """With a further source before a and b, it says whether c is added to."""
    *_, keeps = True, *site.src[1:-2]
    return onto_first(site, _out_prod_call(site, accumulate=keeps))


def _out_prod_add_grad(node: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ds = dc, da = b·dc, db = a·dcᵀ"""
    return dc, *_out_prod_grad(node, dc)


def _out_prod_add_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for r, m, n in ((1, 1, 1), (5, 8, 3), (4, 33, 13), (600, 70, 2)):
        shapes = (n, m), (r, m), (r, n)
        yield Sample(tuple(rng.standard_normal(s) for s in shapes))


OUT_PROD_ADD = op(
    name="out_prod_add",
    spec=lambda c, a, b: _sum_spec("out_prod_add", c, _out_prod_spec(a, b)),
    ref=lambda c, a, b: c + _out_prod_ref(a, b),
    grad=_out_prod_add_grad,
    samples=_out_prod_add_samples,
    memory=Memory.INPLACE_FIRST,
    strided=True,
    costly=True,
    fuses=("out_prod", "add"),
)
cpu_kernel(OUT_PROD_ADD, _out_prod_add_run, scratch=_out_prod_scratch)
