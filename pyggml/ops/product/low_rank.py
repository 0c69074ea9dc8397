"""Products with a weight and, in the same pass over the result, what LoRA adds to them.

mul_mat_low_rank(b, t, w, x)           y   = x·wᵀ + t·bᵀ        saved with `rounds`: y as bfloat16
out_prod_low_rank(a, s, w, dy)         dx  = dy·w + s·a
out_prod_low_rank_add(c, a, s, w, dy)  dx' = c + dy·w + s·a     in c's memory

w (N, K) of any type; float32 are b (N, R), a (R, K), t and s (T, R), x (T, K), dy (T, N). The CPU
puts them in graphs (pyggml.backends.cpu.rewrites.joint_products). pyggml.kernels.gemm.beside says
how they keep the bits.
"""

from collections.abc import Iterator

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute, Site, cpu_kernel, onto_first
from pyggml.ops.expect import expect, expect_axes
from pyggml.ops.product.problem import bind, packing_of, weight_problem

_NO_GRAD = NoGrad("it takes the place of nodes whose gradients are built already")
_SIZES = (1, 1, 1, 1), (5, 40, 33, 3), (13, 70, 300, 8)  # T, N, K, R of samples


def mul_mat_low_rank(b: Tensor, t: Tensor, w: Tensor, x: Tensor, rounds: bool = False) -> Tensor:
    """x·wᵀ + t·bᵀ; with `rounds`, saved is the same as BF16."""
    return MUL_MAT_LOW_RANK(b, t, w, x, rounds=rounds)


def out_prod_low_rank(a: Tensor, s: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    """dy·w + s·a."""
    return OUT_PROD_LOW_RANK(a, s, w, dy)


def out_prod_low_rank_add(c: Tensor, a: Tensor, s: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    """c + dy·w + s·a."""
    return OUT_PROD_LOW_RANK_ADD(c, a, s, w, dy)


def _problem(form: gemm.Form, node: Tensor, compute: Compute) -> gemm.Problem:
    return weight_problem(form, node, node.src[-1], compute, rank=node.src[-3].shape[1])


def _call(site: Site, form: gemm.Form, accumulate: bool, beside: gemm.LowRank) -> Call:
    p = _problem(form, site.node, site.compute)
    return bind(site, p, site.src[-1], form, accumulate, beside)


# -- mul_mat_low_rank ---------------------------------------------------------------------------


def _mul_mat_spec(b: Tensor, t: Tensor, w: Tensor, x: Tensor, rounds: bool) -> Spec:
    name = "mul_mat_low_rank"
    for what, source in (("b", b), ("t", t), ("w", w)):
        expect_axes(name, what, source, 2)
    (n, k), (m, r) = w.shape, t.shape
    expect(name, "b", b, (n, r))
    expect(name, "t", t, (m, r))
    expect(name, "x", x, (m, k))
    return Spec((m, n))


def _mul_mat_run(site: Site) -> Call:
    b, t = site.src[:2]
    return _call(site, "mul_mat", accumulate=False, beside=gemm.LowRank(t, b, *site.saved))


def _mul_mat_scratch(node: Tensor, compute: Compute) -> int:
    return gemm.scratch_bytes(_problem("mul_mat", node, compute))


def _mul_mat_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for m, n, k, r in _SIZES:
        shapes = (n, r), (m, r), (n, k), (m, k)
        yield Sample(tuple(rng.standard_normal(s) for s in shapes), {"rounds": m > 1})


MUL_MAT_LOW_RANK = op(
    name="mul_mat_low_rank",
    spec=_mul_mat_spec,
    ref=lambda b, t, w, x, rounds: x @ w.T + t @ b.T,
    grad=_NO_GRAD,
    samples=_mul_mat_samples,
    refuses={"rounds": ()},
    saved=lambda b, t, w, x, rounds: (Spec((x.shape[0], w.shape[0]), BF16),) if rounds else (),
    costly=True,
    fuses=("mul_mat", "mul_mat_add", "cpy"),
)
cpu_kernel(MUL_MAT_LOW_RANK, _mul_mat_run, scratch=_mul_mat_scratch, shared=packing_of)

# -- out_prod_low_rank --------------------------------------------------------------------------


def _out_prod_spec(a: Tensor, s: Tensor, w: Tensor, dy: Tensor) -> Spec:
    name = "out_prod_low_rank"
    for what, source in (("a", a), ("s", s), ("w", w)):
        expect_axes(name, what, source, 2)
    (n, k), (m, r) = w.shape, s.shape
    expect(name, "a", a, (r, k))
    expect(name, "s", s, (m, r))
    expect(name, "dy", dy, (m, n))
    return Spec((m, k))


def _out_prod_call(site: Site, accumulate: bool) -> Call:
    a, s = site.src[-4:-2]
    return _call(site, "out_prod", accumulate, gemm.LowRank(s, a))


def _out_prod_run(site: Site) -> Call:
    return _out_prod_call(site, accumulate=False)


def _out_prod_scratch(node: Tensor, compute: Compute) -> int:
    return gemm.scratch_bytes(_problem("out_prod", node, compute))


def _out_prod_ref(a: np.ndarray, s: np.ndarray, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return dy @ w + s @ a


def _out_prod_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for m, n, k, r in _SIZES:
        shapes = (r, k), (m, r), (n, k), (m, n)
        yield Sample(tuple(rng.standard_normal(s) for s in shapes))


OUT_PROD_LOW_RANK = op(
    name="out_prod_low_rank",
    spec=_out_prod_spec,
    ref=_out_prod_ref,
    grad=_NO_GRAD,
    samples=_out_prod_samples,
    costly=True,
    fuses=("out_prod", "out_prod_add"),
)
cpu_kernel(OUT_PROD_LOW_RANK, _out_prod_run, scratch=_out_prod_scratch)

# -- out_prod_low_rank_add ----------------------------------------------------------------------


def _out_prod_add_spec(c: Tensor, a: Tensor, s: Tensor, w: Tensor, dy: Tensor) -> Spec:
    product = _out_prod_spec(a, s, w, dy)
    expect("out_prod_low_rank_add", "c", c, product.shape)
    return product


def _out_prod_add_run(site: Site) -> Call:
    return onto_first(site, _out_prod_call(site, accumulate=True))


def _out_prod_add_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for m, n, k, r in _SIZES:
        shapes = (m, k), (r, k), (m, r), (n, k), (m, n)
        yield Sample(tuple(rng.standard_normal(s) for s in shapes))


OUT_PROD_LOW_RANK_ADD = op(
    name="out_prod_low_rank_add",
    spec=_out_prod_add_spec,
    ref=lambda c, *factors: c + _out_prod_ref(*factors),
    grad=_NO_GRAD,
    samples=_out_prod_add_samples,
    memory=Memory.INPLACE_FIRST,
    costly=True,
    fuses=("out_prod_add", "out_prod_add"),
)
cpu_kernel(OUT_PROD_LOW_RANK_ADD, _out_prod_add_run, scratch=_out_prod_scratch)
