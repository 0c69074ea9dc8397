"""RMS norm and its weight in one pass, as ggml fuses RMS_NORM and MUL. Models use this op.

rms_norm_mul         y  = x·r·w,  r = 1/sqrt(mean(x²) + eps), w the same for every row
rms_norm_mul_back    dx = r·(w·dy − x·r²·mean(x·w·dy))
rms_norm_mul_back_w  dw = Σ over rows of r·x·dy
"""

from collections.abc import Iterator
from functools import partial
from math import prod

import numpy as np

from pyggml.formulas.formula import formula, gradient_formula
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import dot
from pyggml.kernels.kernel import Compute, Site, as_rows, cpu_kernel
from pyggml.ops import formulas
from pyggml.ops.by_formula import declare_formula, with_dy
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_number, expect_type
from pyggml.ops.second_order import SECOND_ORDER

_ONE = np.float32(1)
_CHUNK_ROWS = 32  # summed by one thread; fixed, so that the sum is the same at any thread count


def rms_norm_mul(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Each row of x (..., n) F32 over its root mean square, times w (n,) F32."""
    return RMS_NORM_MUL(x, w, eps=float(eps))


def rms_norm_mul_back(x: Tensor, w: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """d(loss)/dx of rms_norm_mul, given dy = d(loss)/dy of x's shape."""
    return RMS_NORM_MUL_BACK(x, w, dy, eps=float(eps))


def rms_norm_mul_back_w(x: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """d(loss)/dw (n,) of rms_norm_mul, given dy = d(loss)/dy of x's shape."""
    return RMS_NORM_MUL_BACK_W(x, dy, eps=float(eps))


# -- rms_norm_mul, and its gradient by x -----------------------------------------------------------


def _check(name: str, eps: float) -> None:
    expect_number(name, "eps", eps)


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = r · (g - n · mean(g · n)) with g = dy · w and n = r · x, dw = Σ_rows dy · n"""
    x, w = node.src
    return (RMS_NORM_MUL_BACK(x, w, dy, **node.params), RMS_NORM_MUL_BACK_W(x, dy, **node.params))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    # 70 rows are two whole chunks and a rest; the last case is larger than ALONE.
    for shape in [(1, 2), (3, 8), (2, 35, 33), (71, 65)]:
        x, w = rng.standard_normal(shape), rng.standard_normal(shape[-1])
        yield Sample((x, w), {"eps": 1e-5})


_FORMULA = formula(formulas.rms_norm_mul, shared=("w",))
_BACK = gradient_formula("rms_norm_mul_back", _FORMULA, "x")
_declare = partial(
    declare_formula, ggml=GGMLOp.CUSTOM, refuses={"eps": NONE_FROM_ZERO}, check=_check,
    memory=Memory.FRESH, halves=False,
)  # fmt: skip
RMS_NORM_MUL = _declare(_FORMULA, _samples, grad=_grad, fuses=("rms_norm", "mul"))
RMS_NORM_MUL_BACK = _declare(
    _BACK, with_dy(_FORMULA, _BACK, _samples), fuses=("rms_norm_back", "mul")
)

# -- rms_norm_mul_back_w ------------------------------------------------------------------------


def _rms_norm_mul_back_w_spec(x: Tensor, dy: Tensor, eps: float) -> Spec:
    expect_type("rms_norm_mul_back_w", "x", x)
    expect("rms_norm_mul_back_w", "dy", dy, x.shape)
    expect_number("rms_norm_mul_back_w", "eps", eps)
    return Spec(x.shape[-1:])


def _n_chunks(n_rows: int) -> int:
    return -(-n_rows // _CHUNK_ROWS)


def _rms_norm_mul_back_w_scratch(node: Tensor, compute: Compute) -> int:
    *outer, n = node.src[0].shape
    return _n_chunks(prod(outer)) * n * F32.block_bytes


@kernel
def _rate(x, eps):
    """1/sqrt(mean(x²) + eps) of a row."""
    return _ONE / np.sqrt(dot(x, x) / np.float32(x.size) + eps)


@kernel
def _sum_rows(total, x, dy, eps):
    for j in range(total.size):
        total[j] = np.float32(0)
    for i in range(x.shape[0]):
        xi, di, r = x[i], dy[i], _rate(x[i], eps)
        for j in range(total.size):
            total[j] += xi[j] * di[j] * r


@kernel
def _sum_parts(dw, part):
    for j in range(dw.size):
        dw[j] = np.float32(0)
    for c in range(part.shape[0]):
        pc = part[c]
        for j in range(dw.size):
            dw[j] += pc[j]


@parallel
def _rms_norm_mul_back_w(dw, x, dy, part, eps):
    """part (n_chunks, n) is scratch: the sum over the rows of each chunk."""
    for c in prange(part.shape[0]):
        first, last = c * _CHUNK_ROWS, min((c + 1) * _CHUNK_ROWS, x.shape[0])
        _sum_rows(part[c], x[first:last], dy[first:last], eps)
    _sum_parts(dw, part)


def _rms_norm_mul_back_w_run(site: Site) -> Call:
    x, dy = (as_rows(a) for a in site.src)
    part = site.scratch.view(np.float32).reshape(_n_chunks(x.shape[0]), x.shape[1])
    return Call(_rms_norm_mul_back_w, site.out, x, dy, part, *site.scalars)


def _rms_norm_mul_back_w_ref(x: np.ndarray, dy: np.ndarray, eps: float) -> np.ndarray:
    rate = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return np.asarray((x * dy * rate).reshape(-1, x.shape[-1]).sum(axis=0))


def _rms_norm_mul_back_w_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        x = s.arrays[0]
        yield Sample((x, rng.standard_normal(x.shape)), s.params)


RMS_NORM_MUL_BACK_W = op(
    name="rms_norm_mul_back_w",
    spec=_rms_norm_mul_back_w_spec,
    ref=_rms_norm_mul_back_w_ref,
    grad=SECOND_ORDER,
    samples=_rms_norm_mul_back_w_samples,
    refuses={"eps": NONE_FROM_ZERO},
    costly=True,
)
cpu_kernel(RMS_NORM_MUL_BACK_W, _rms_norm_mul_back_w_run, scratch=_rms_norm_mul_back_w_scratch)
