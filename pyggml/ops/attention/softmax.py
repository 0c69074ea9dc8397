"""Softmax of each row (the last axis), with scale, mask and ALiBi slopes (Press et al. 2022).

soft_max        y  = e^z / (Σ e^z + e^sink),  z = scale·x + slope·mask
soft_max_back   dx = scale·y·(dy − Σ y·dy)

Without ALiBi (max_bias = 0) the slope is 1. With it, head h < m has 2^(−max_bias·(h + 1)/m), and
another head 2^(−max_bias·(2·(h − m) + 1)/(2·m)); m is the largest power of two <= n_head.
A mask of −inf gives exactly 0. A row masked as a whole becomes zeros; ggml's is NaN.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.formula import Formula, formula, joint
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor, leaf
from pyggml.kernels.kernel import Site, as_four, cpu_kernel
from pyggml.kernels.rows import call_by_row
from pyggml.ops import formulas
from pyggml.ops.arithmetic.arith import mul, neg
from pyggml.ops.arithmetic.broadcast import four_axes
from pyggml.ops.arithmetic.reduce import sum_rows
from pyggml.ops.attention.positions import alibi_slopes
from pyggml.ops.by_formula import formula_op
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_number, expect_type
from pyggml.ops.layout.layout import reshape
from pyggml.ops.layout.repeat import repeat_back
from pyggml.ops.second_order import SECOND_ORDER

_Array = TypeVar("_Array")


def soft_max(
    x: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    max_bias: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax over the last axis of x ([[n_batch,] n_head,] n_q, n_k) F32 (ggml's SOFT_MAX).

    mask is F32, has x's last two sizes, and is repeated over heads and batch. max_bias > 0
    multiplies it by each head's ALiBi slope. sinks (n_head,) F32 are one more score for each row:
    it enters the sum, but is no element of the result. Mask and sinks have gradients. Raises
    ShapeError if one does not fit, if max_bias is below 0, or if it is above 0 without a mask.
    """
    sources = (t for t in (x, mask, sinks) if t is not None)
    return SOFT_MAX(*sources, scale=float(scale), max_bias=float(max_bias), masked=mask is not None)


def soft_max_back(dy: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """d(loss)/dx of soft_max, given dy = d(loss)/dy and its result y; all of one shape."""
    return SOFT_MAX_BACK(dy, y, scale=float(scale))


# -- soft_max -----------------------------------------------------------------------------------


def _extras(extras: tuple[Any, ...], masked: bool) -> tuple[Any, Any]:
    """The optional sources after x as (mask, sinks), None for an absent one."""
    return (*extras, None)[:2] if masked else (None, *extras, None)[:2]


def _soft_max_spec(x: Tensor, *extras: Tensor, scale: float, max_bias: float, masked: bool) -> Spec:
    expect_type("soft_max", "x", x)
    m, sinks = _extras(extras, masked)
    expect_number("soft_max", "max_bias", max_bias)
    if max_bias > 0 and m is None:
        raise ShapeError(f"soft_max: max_bias is {max_bias}, wanted a mask for it to weigh")
    if m is not None:
        expect_type("soft_max", "mask", m)
        outer = tuple(zip(reversed(x.shape[:-2]), reversed(m.shape[:-2]), strict=False))
        fits = m.shape[-2:] == x.shape[-2:] and all(k and n % k == 0 for n, k in outer)
        if not fits or len(m.shape) > len(x.shape):
            raise ShapeError(f"soft_max: mask {m!r} cannot be repeated to the shape of {x!r}")
    if sinks is not None:
        expect("soft_max", "sinks", sinks, four_axes(x.shape)[1:2])
    return Spec(x.shape)


_SINGLE, _TILED = ("slope", "sink"), ("mask", "slope", "sink")
_FORMULAS = [
    formula(f, single=_SINGLE, tiled=_TILED) for f in (formulas.soft_max, formulas.sink_share)
]
_WHOLE = {False: _FORMULAS[0].without("soft_max", sink=formulas.LOWEST)}
_WHOLE |= {True: joint("soft_max_sinks", _FORMULAS)}


@cache
def _formula(masked: bool, has_sinks: bool) -> Formula:
    """Of the sources that there are; with sinks, the sink's share is a result too."""
    whole = _WHOLE[has_sinks]
    return whole if masked else whole.without(f"{whole.name}_alone", mask=0, slope=0)


def soft_max_rows(
    node: Tensor, sources: Sequence[_Array], constant: Callable[[np.ndarray], _Array]
) -> tuple[Formula, list[_Array], list[Shape]]:
    """A node's formula, its sources, slopes among them, and the three axes of rows of each."""
    x, *extras = node.src
    p, four = node.params, four_axes(x.shape)
    mask, sinks = _extras(tuple(extras), p["masked"])
    arrays, of_heads = list(sources), (1, four[1], 1)
    axes = [four[:3], of_heads] if sinks is not None else [four[:3]]
    if mask is not None:
        slopes = alibi_slopes(four[1], p["max_bias"]).astype(np.float32)
        arrays.insert(2, constant(slopes))
        axes[1:1] = [four_axes(mask.shape)[:3], of_heads]
    return _formula(mask is not None, sinks is not None), arrays, axes


def _soft_max_saved(x: Tensor, *extras: Tensor, masked: bool, **_: float) -> tuple[Spec, ...]:
    """With sinks: the sink's share of each row."""
    return (Spec((*x.shape[:-1], 1)),) if len(extras) > masked else ()


def _soft_max_run(site: Site) -> Call:
    of, sources, axes = soft_max_rows(site.node, site.src, np.asarray)
    return call_by_row(of, [site.out, *site.saved], sources, *site.scalars[:1], axes=axes)


def _soft_max_ref(
    x: np.ndarray, *extras: np.ndarray, scale: float, max_bias: float, masked: bool
) -> np.ndarray:
    four = four_axes(x.shape)
    slopes = alibi_slopes(four[1], max_bias)
    mask, sinks = _extras(extras, masked)
    of = _formula(masked, sinks is not None)
    sources = {"x": x, "mask": mask, "slope": slopes, "sink": sinks}
    arrays = (
        np.reshape(sources[s], (1, -1, 1, 1)) if s in _SINGLE else as_four(sources[s])
        for s in of.sources
    )
    return of(*arrays, scale=scale).reshape(x.shape)


def _soft_max_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = scale · y · (dy - Σ_j dy_j · y_j), dmask = the same by slope, summed over heads"""
    x, *extras = node.src
    p = node.params
    gradients = [soft_max_back(dy, node, p["scale"])]
    mask, sinks = _extras(tuple(extras), p["masked"])
    n_head = four_axes(x.shape)[1]
    if mask is not None:
        slopes = alibi_slopes(n_head, p["max_bias"]).astype(np.float32).reshape(-1, 1, 1)
        dz = reshape(soft_max_back(dy, node), four_axes(x.shape))
        dmask = repeat_back(mul(dz, leaf(slopes)), four_axes(mask.shape))
        gradients.append(reshape(dmask, mask.shape))
    if sinks is not None:  # d(y_j)/d(sink) = −y_j · the sink's share
        lost = reshape(mul(node.saved[0], sum_rows(mul(dy, node))), (*four_axes(x.shape)[:3], 1))
        gradients.append(neg(reshape(repeat_back(lost, (1, n_head, 1, 1)), (n_head,))))
    return tuple(gradients)


def _soft_max_samples(rng: np.random.Generator) -> Iterator[Sample]:
    plain: dict[str, Any] = {"scale": 1.0, "max_bias": 0.0, "masked": False}
    for shape in [(1, 1), (3, 40)]:
        yield Sample((rng.standard_normal(shape),), plain)
        yield Sample((rng.standard_normal(shape), rng.standard_normal(1)), plain)
    masked = {"scale": 0.3, "max_bias": 0.0, "masked": True}
    causal = np.where(np.tri(5, 7, 2, dtype=bool), 0, -np.inf)
    x, sinks = rng.standard_normal((2, 6, 5, 7)), rng.standard_normal(6)
    yield Sample((x, causal), masked)
    yield Sample((x, causal, sinks), masked)
    yield Sample((x[0], sinks), plain)
    yield Sample((x, -rng.uniform(0, 3, (2, 3, 5, 7)), sinks), {**masked, "max_bias": 8.0})


SOFT_MAX = op(
    name="soft_max",
    ggml=GGMLOp.SOFT_MAX,
    spec=_soft_max_spec,
    ref=_soft_max_ref,
    grad=_soft_max_grad,
    samples=_soft_max_samples,
    refuses={"scale": (), "max_bias": NONE_FROM_ZERO, "masked": ()},
    memory=Memory.INPLACE,
    saved=_soft_max_saved,
    halves=True,
)
cpu_kernel(SOFT_MAX, _soft_max_run)

# -- soft_max_back ------------------------------------------------------------------------------


def _soft_max_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 40), (2, 3, 4, 5)]:
        dy, y = rng.standard_normal(shape), rng.dirichlet(np.ones(shape[-1]), shape[:-1])
        yield Sample((dy, y), {"scale": 0.5})


SOFT_MAX_BACK = formula_op(
    formulas.soft_max_back, GGMLOp.SOFT_MAX_BACK, _soft_max_back_samples, {"scale": ()},
    grad=SECOND_ORDER,
)  # fmt: skip
