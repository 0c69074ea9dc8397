"""Normalisation of each row (the last axis), or of groups of channels (arXiv:1803.08494).

F16 and BF16 are computed as F32, and the result is of x's type (Op.halves). A back op takes F32,
its forward op's sources, then dy. An eps below 0 is refused. With eps = 0, a row of
zeros gives NaN; with norm, any constant row does.

rms_norm        y  = x·r,  r = 1/sqrt(mean(x²) + eps)
rms_norm_back   dx = r·(dy − x·r²·mean(x·dy))
norm            y  = (x − mean(x))·r,  r = 1/sqrt(var(x) + eps), var over n, not n − 1
norm_back       dx = r·(dy − mean(dy) − y·mean(y·dy))
l2_norm         y  = x / max(‖x‖, eps)
l2_norm_back    dx = (dy − y·Σ y·dy) / ‖x‖ where ‖x‖ > eps, else dy / eps
group_norm      norm of each group of channels; group_norm_back is as norm_back
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import OPS, Memory, Op, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.kernels.rows import call_by_row
from pyggml.ops import formulas
from pyggml.ops.by_formula import Samples, formula_op
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_axes, expect_number, expect_type
from pyggml.ops.second_order import SECOND_ORDER


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Each row of x (..., n) F32 divided by its root mean square (ggml's RMS_NORM)."""
    return RMS_NORM(x, eps=float(eps))


def rms_norm_back(x: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """d(loss)/dx of rms_norm, given dy = d(loss)/dy; all of one shape."""
    return RMS_NORM_BACK(x, dy, eps=float(eps))


def norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row of x (..., n) F32 less its mean, over its deviation (ggml's NORM, LayerNorm)."""
    return NORM(x, eps=float(eps))


def norm_back(x: Tensor, dy: Tensor, eps: float = 1e-5) -> Tensor:
    """d(loss)/dx of norm, given dy = d(loss)/dy; all of one shape."""
    return NORM_BACK(x, dy, eps=float(eps))


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Each row of x (..., n) F32 divided by its length, or by eps if that is more (L2_NORM)."""
    return L2_NORM(x, eps=float(eps))


def l2_norm_back(x: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """d(loss)/dx of l2_norm, given dy = d(loss)/dy; all of one shape."""
    return L2_NORM_BACK(x, dy, eps=float(eps))


def _check(name: str, eps: float) -> None:
    expect_number(name, "eps", eps)


def norm_op(
    function: Callable[..., Any], ggml: GGMLOp, samples: Samples, gradient: str, back: GGMLOp
) -> Op:
    """Declare a norm of rows and its gradient, see `formula_op`."""
    eps = {"eps": NONE_FROM_ZERO}
    return formula_op(function, ggml, samples, eps, _check, back=back, gradient=gradient)


def _norm_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 3), (3, 8), (2, 5, 33)]:
        yield Sample((rng.standard_normal(shape),), {"eps": 1e-5})


def _l2_norm_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _norm_samples(rng)
    yield Sample((rng.standard_normal((3, 8)),), {"eps": 100.0})  # every row is shorter than eps


RMS_NORM = norm_op(
    formulas.rms_norm, GGMLOp.RMS_NORM, _norm_samples, back=GGMLOp.RMS_NORM_BACK,
    gradient="dx = r · (dy - y · mean(dy · y)), r = 1 / √(mean x² + eps)",
)  # fmt: skip
RMS_NORM_BACK = OPS["rms_norm_back"]
NORM = norm_op(
    formulas.norm, GGMLOp.NORM, _norm_samples, back=GGMLOp.CUSTOM,
    gradient="dx = r · (dy - mean dy - y · mean(dy · y)), r = 1 / √(variance + eps)",
)  # fmt: skip
NORM_BACK = OPS["norm_back"]
L2_NORM = norm_op(
    formulas.l2_norm, GGMLOp.L2_NORM, _l2_norm_samples, back=GGMLOp.CUSTOM,
    gradient="dx = (dy - y · Σ dy · y) / |x|, and dy / eps where |x| < eps",
)  # fmt: skip
L2_NORM_BACK = OPS["l2_norm_back"]

# -- group_norm -----------------------------------------------------------------------------------


def group_norm(x: Tensor, n_groups: int, eps: float = 1e-6) -> Tensor:
    """x ([n_batch,] n_channels, height, width) F32, normalised in n_groups runs of channels.

    ggml's GROUP_NORM: the last group is smaller where n_groups does not divide the channels. Raises
    ShapeError if a group would be empty; ggml divides by its 0 channels.
    """
    return GROUP_NORM(x, n_groups=n_groups, eps=float(eps))


def group_norm_back(x: Tensor, dy: Tensor, n_groups: int, eps: float = 1e-6) -> Tensor:
    """d(loss)/dx of group_norm, given dy = d(loss)/dy; all of one shape."""
    return GROUP_NORM_BACK(x, dy, n_groups=n_groups, eps=float(eps))


def _spec(x: Tensor, *dy: Tensor, n_groups: int, eps: float) -> Spec:
    expect_type("group_norm", "x", x)
    expect_axes("group_norm", "x", x, 3, 4)
    for t in dy:
        expect("group_norm_back", "dy", t, x.shape)
    expect_number("group_norm", "eps", eps)
    n = x.shape[-3]
    if n_groups < 1 or (n and (n_groups - 1) * -(-n // n_groups) >= n):
        raise ShapeError(
            f"group_norm: {n_groups} groups of the channels of {x!r}, wanted none empty"
        )
    return Spec(x.shape)


def _in_groups(a: np.ndarray, n_groups: int) -> Iterator[np.ndarray]:
    """One row per group, in one array if all are as large, else in two for each batch."""
    if a.shape[-3] % n_groups == 0:
        yield a.reshape((a.shape[0] if a.ndim == 4 else 1) * n_groups, -1)
        return
    last = (n_groups - 1) * -(-a.shape[-3] // n_groups)
    for batch in a if a.ndim == 4 else a[None]:
        yield batch[:last].reshape(n_groups - 1, -1)
        yield batch[last:].reshape(1, -1)


def _run(of: Op) -> Callable[[Site], Call]:
    formula = of.formula
    assert formula is not None

    def run(site: Site) -> Call:
        p = site.node.params
        parts = zip(*(_in_groups(a, p["n_groups"]) for a in (site.out, *site.src)), strict=True)
        eps = np.float32(p["eps"])
        first, *rest = (call_by_row(formula, [out], src, eps) for out, *src in parts)
        return Call(one_by_one, [first, *rest]) if rest else first

    return run


def _by_group(
    of_rows: Callable[..., np.ndarray], *arrays: np.ndarray, n_groups: int, eps: float
) -> np.ndarray:
    """Each group as one row, batch by batch."""
    y, n_channels = np.empty(arrays[0].shape), arrays[0].shape[-3]
    each = -(-n_channels // n_groups)
    for start in range(0, n_channels, each):
        group = (..., slice(start, start + each), slice(None), slice(None))
        shape = y[group].shape
        rows = (a[group].reshape(*shape[:-3], -1) for a in arrays)
        y[group] = of_rows(*rows, eps=eps).reshape(shape)
    return y


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = r · (dy - mean dy - y · mean(dy · y)) in each group, r = 1 / √(variance + eps)"""
    return (GROUP_NORM_BACK(node.src[0], dy, **node.params),)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    groups, each = rng.integers(1, 5, 2).tolist()
    cases = [((4, 2, 3), 2), ((6, 3, 5), 3), ((2, 4, 3, 2), 1), ((3, 5, 2, 7), 5)]
    cases += [((5, 2, 3), 3), ((2, 7, 2, 2), 2)]
    for shape, n_groups in [*cases, ((2, groups * each, 3, 3), groups)]:
        yield Sample((rng.standard_normal(shape),), {"n_groups": n_groups, "eps": 1e-5})


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        yield Sample((*s.arrays, rng.standard_normal(s.arrays[0].shape)), s.params)


GROUP_NORM = op(
    name="group_norm",
    ggml=GGMLOp.GROUP_NORM,
    spec=_spec,
    ref=partial(_by_group, NORM.ref),
    grad=_grad,
    samples=_samples,
    refuses={"n_groups": (0, -1, 999), "eps": NONE_FROM_ZERO},
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(GROUP_NORM, _run(NORM))
GROUP_NORM_BACK = op(
    name="group_norm_back",
    spec=_spec,
    ref=partial(_by_group, NORM_BACK.ref),
    grad=SECOND_ORDER,
    samples=_back_samples,
    refuses={"n_groups": (0, -1, 999), "eps": NONE_FROM_ZERO},
)
cpu_kernel(GROUP_NORM_BACK, _run(NORM_BACK))
