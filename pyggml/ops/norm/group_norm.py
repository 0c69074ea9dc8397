"""Normalisation of groups of channels, each by its own mean and variance (arXiv:1803.08494).

group_norm        y  = (x − mean)·r,  r = 1/sqrt(var + eps) of each group
group_norm_back   dx = r·(dy − mean(dy) − y·mean(y·dy))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_axes, expect_number, expect_type
from pyggml.ops.norm.norm import NORM_BACK, norm_back_rows, norm_rows


def group_norm(x: Tensor, n_groups: int, eps: float = 1e-6) -> Tensor:
    """x ([n_batch,] n_channels, height, width) F32, normalised in n_groups runs of channels.

    ggml's GROUP_NORM. Raises ShapeError if n_groups does not divide the channels; ggml makes the
    last groups smaller, or empty.
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
    if n_groups < 1 or x.shape[-3] % n_groups:
        raise ShapeError(f"group_norm: {n_groups} groups do not divide the channels of {x!r}")
    return Spec(x.shape)


def _in_groups(a: np.ndarray, n_groups: int) -> np.ndarray:
    """One row per group of each batch."""
    n_batch = a.shape[0] if a.ndim == 4 else 1
    return a.reshape(n_batch * n_groups, -1)


def _run(code: Callable[..., None]) -> Callable[[Site], Call]:
    def run(site: Site) -> Call:
        p = site.node.params
        arrays = (_in_groups(a, p["n_groups"]) for a in (site.out, *site.src))
        return Call(code, *arrays, np.float32(p["eps"]))

    return run


def _ref(x: np.ndarray, n_groups: int, eps: float) -> np.ndarray:
    groups = x.reshape(-1, n_groups, x.shape[-3] // n_groups, *x.shape[-2:])
    centred = groups - groups.mean((2, 3, 4), keepdims=True)
    y = centred / np.sqrt(groups.var((2, 3, 4), keepdims=True) + eps)
    return np.asarray(y.reshape(x.shape))


def _back_ref(x: np.ndarray, dy: np.ndarray, n_groups: int, eps: float) -> np.ndarray:
    arrays = (_in_groups(a, n_groups) for a in (x, dy))
    return np.asarray(NORM_BACK.ref(*arrays, eps).reshape(x.shape))


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = r · (dy - mean dy - y · mean(dy · y)) in each group, r = 1 / √(variance + eps)"""
    return (GROUP_NORM_BACK(node.src[0], dy, **node.params),)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    groups, each = rng.integers(1, 5, 2).tolist()
    cases = [((4, 2, 3), 2), ((6, 3, 5), 3), ((2, 4, 3, 2), 1), ((3, 5, 2, 7), 5)]
    for shape, n_groups in [*cases, ((2, groups * each, 3, 3), groups)]:
        yield Sample((rng.standard_normal(shape),), {"n_groups": n_groups, "eps": 1e-5})


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        yield Sample((*s.arrays, rng.standard_normal(s.arrays[0].shape)), s.params)


GROUP_NORM = op(
    name="group_norm",
    ggml=GGMLOp.GROUP_NORM,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
    refuses={"n_groups": (0, -1, 999), "eps": NONE_FROM_ZERO},
    memory=Memory.INPLACE,
)
cpu_kernel(GROUP_NORM, _run(norm_rows))
GROUP_NORM_BACK = op(
    name="group_norm_back",
    ggml=GGMLOp.CUSTOM,
    spec=_spec,
    ref=_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_back_samples,
    refuses={"n_groups": (0, -1, 999), "eps": NONE_FROM_ZERO},
    memory=Memory.FRESH,
)
cpu_kernel(GROUP_NORM_BACK, _run(norm_back_rows))
