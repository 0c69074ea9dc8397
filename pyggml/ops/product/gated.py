"""A gated unit of two products of the same rows, as in a feed-forward part.

mul_mat_gated(g, u, x, unit)    y = unit(x·gᵀ, x·uᵀ)

g and u (N, K) of one type, x (T, K) float32; unit names an op of gate and up without settings, one
of UNITS. The CPU puts it in graphs (pyggml.backends.cpu.rewrites.gated_products).
"""

from collections.abc import Iterator, Mapping

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.formula import Formula
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.kernels import gemm
from pyggml.kernels.formulas import loop_of
from pyggml.kernels.gemm.amx import gated
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.activation.glu import GEGLU, GEGLU_ERF, GEGLU_QUICK, REGLU, SWIGLU
from pyggml.ops.expect import expect, expect_axes
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.ops.product.problem import weight_problem

UNITS: Mapping[str, Formula] = {
    op.name: op.formula for op in (SWIGLU, REGLU, GEGLU, GEGLU_QUICK, GEGLU_ERF) if op.formula
}


def mul_mat_gated(g: Tensor, u: Tensor, x: Tensor, unit: str = SWIGLU.name) -> Tensor:
    """unit(x·gᵀ, x·uᵀ): g, u (N, K) of one type, x (T, K) F32 -> (T, N) F32.

    Raises ShapeError for other shapes, types that differ, and what is no unit of gate and up.
    """
    return MUL_MAT_GATED(g, u, x, unit=unit)


def _spec(g: Tensor, u: Tensor, x: Tensor, unit: str) -> Spec:
    if unit not in UNITS:
        raise ShapeError(f"mul_mat_gated: unit is {unit!r}, wanted one of {', '.join(UNITS)}")
    expect_axes("mul_mat_gated", "g", g, 2)
    (n, k), m = g.shape, x.shape[0] if x.shape else 0
    expect("mul_mat_gated", "u", u, (n, k), g.dtype)
    expect("mul_mat_gated", "x", x, (m, k))
    return Spec((m, n))


def _problem(node: Tensor, compute: Compute) -> gemm.Problem:
    return weight_problem("mul_mat", node, node.src[-1], compute)


def _scratch(node: Tensor, compute: Compute) -> int:
    p = _problem(node, compute)
    if gated.takes(p):
        return gated.layout(p).n_bytes
    return gemm.scratch_bytes(p) + 2 * p.m * p.n * F32.block_bytes


def _run(site: Site) -> Call:
    """One kernel on tiles; else the products, one after the other, and the unit."""
    p, (g, u, x) = _problem(site.node, site.compute), site.src
    unit = UNITS[site.node.params["unit"]]
    if gated.takes(p):
        return gated.call_of(p, gemm.Operands(site.out, x, g, site.scratch, False), u, unit)
    own = gemm.scratch_bytes(p)
    both = site.scratch[own:].view(np.float32).reshape(2, p.m, p.n)
    products = [
        gemm.call_of(p, gemm.Operands(c, x, w, site.scratch[:own], False))
        for c, w in zip(both, (g, u), strict=True)
    ]
    loop = loop_of(unit, (F32, F32), (BF16 if site.node.dtype is BF16 else F32,))
    flat = (a.reshape(-1) for a in (site.out, *both))
    return Call(one_by_one, [*products, Call(loop, *flat)])


def _ref(g: np.ndarray, u: np.ndarray, x: np.ndarray, unit: str) -> np.ndarray:
    return np.asarray(UNITS[unit](x @ g.T, x @ u.T))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for (t, n, k), unit in (
        ((1, 1, 32), "reglu"),
        ((5, 70, 64), "swiglu"),
        ((37, 40, 96), "geglu"),
    ):
        weights = (packed_leaf(rng, (n, k), "Q8_0") for _ in range(2))
        yield Sample((*weights, rng.standard_normal((t, k))), {"unit": unit})


MUL_MAT_GATED = op(
    name="mul_mat_gated",
    spec=_spec,
    ref=_ref,
    grad=NoGrad("it takes the place of nodes whose gradients are built already"),
    samples=_samples,
    refuses={"unit": ("", "add", "swiglu_oai")},
    costly=True,
    fuses=("mul_mat", "mul_mat", "swiglu"),
)
cpu_kernel(MUL_MAT_GATED, _run, scratch=_scratch)
