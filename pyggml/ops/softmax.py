"""Softmax of each row (the last axis), with scale, mask and ALiBi slopes (Press et al. 2022).

soft_max        y  = e^z / Σ e^z,  z = scale·x + slope·mask
soft_max_back   dx = scale·y·(dy − Σ y·dy)

slope is 1 without ALiBi (max_bias = 0), else 2^(−max_bias·(h + 1)/m) for head h < m and
2^(−max_bias·(2·(h − m) + 1)/(2·m)) for the others, m the largest power of two <= n_head.
A mask of −inf gives exactly 0; a row that is masked whole becomes zeros, where ggml's is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml._jit import kernel, parallel, prange
from pyggml._simd import exp32, row_max
from pyggml.errors import ShapeError
from pyggml.ggml_enums import GGMLOp
from pyggml.ops.expect import expect, expect_type
from pyggml.tensor import (
    PLAIN,
    Call,
    Memory,
    NoGrad,
    Sample,
    Site,
    Spec,
    Tensor,
    as_four,
    op,
    rows,
)

_ZERO = np.float32(0)
_ONE = np.float32(1)
_MINUS_INF = np.float32(-np.inf)


def soft_max(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0
) -> Tensor:
    """Softmax over the last axis of x ([[n_batch,] n_head,] n_q, n_k) F32 (ggml's SOFT_MAX).

    mask is F32, has x's last two sizes, and is repeated over heads and batch. max_bias > 0 weighs
    it by ALiBi's slope of each head. Raises ShapeError if the mask does not fit.
    """
    sources = (x,) if mask is None else (x, mask)
    return SOFT_MAX(*sources, scale=scale, max_bias=max_bias)


def soft_max_back(dy: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """d(loss)/dx of soft_max, given dy = d(loss)/dy and its result y; all of one shape."""
    return SOFT_MAX_BACK(dy, y, scale=scale)


# -- soft_max -----------------------------------------------------------------------------------


def _soft_max_spec(x: Tensor, *mask: Tensor, scale: float, max_bias: float) -> Spec:
    expect_type("soft_max", "x", x)
    for m in mask:
        expect_type("soft_max", "mask", m)
        outer = tuple(zip(reversed(x.shape[:-2]), reversed(m.shape[:-2]), strict=False))
        fits = m.shape[-2:] == x.shape[-2:] and all(n % k == 0 for n, k in outer)
        if not fits or len(m.shape) > len(x.shape):
            raise ShapeError(f"soft_max: mask {m!r} cannot be repeated to the shape of {x!r}")
    return Spec(x.shape)


@kernel
def _masked(z, x, mask, scale, slope):
    for j in range(x.size):
        z[j] = x[j] * scale + mask[j] * slope


@kernel
def _scaled(z, x, scale):
    for j in range(x.size):
        z[j] = x[j] * scale


@kernel
def _soft_max_row(y):
    top = row_max(y)
    if top == _MINUS_INF:
        top = _ZERO
    total = _ZERO
    for j in range(y.size):
        y[j] = exp32(y[j] - top)
        total += y[j]
    share = _ONE / total if total > _ZERO else total
    for j in range(y.size):
        y[j] *= share


@parallel
def _soft_max(y, x, mask, slopes, scale, has_mask):
    """y, x (n_batch, n_head, n_q, n_k); mask has divisors of the first two sizes."""
    n_head, n_q = x.shape[1], x.shape[2]
    for row in prange(x.shape[0] * n_head * n_q):
        b, h, q = row // (n_head * n_q), row // n_q % n_head, row % n_q
        if has_mask:
            weights = mask[b % mask.shape[0], h % mask.shape[1], q]
            _masked(y[b, h, q], x[b, h, q], weights, scale, slopes[h])
        else:
            _scaled(y[b, h, q], x[b, h, q], scale)
        _soft_max_row(y[b, h, q])


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """ALiBi's slope of each head (n_head,) float64; ones if max_bias is not positive."""
    if max_bias <= 0:
        return np.ones(n_head)
    h = np.arange(n_head)
    m = 2 ** (n_head.bit_length() - 1)
    exponent = np.where(h < m, (h + 1) / m, (2 * (h - m) + 1) / (2 * m))
    return np.asarray(np.exp2(-max_bias * exponent))


def _soft_max_run(site: Site) -> Call:
    x = as_four(site.src[0])
    has_mask = len(site.src) > 1
    mask = as_four(site.src[1]) if has_mask else np.zeros((1, 1, 1, 1), np.float32)
    slopes = alibi_slopes(x.shape[1], site.node.params["max_bias"]).astype(np.float32)
    scale = site.scalars[0]
    return _soft_max, (as_four(site.out), x, mask, slopes, scale, has_mask)


def _soft_max_ref(x: np.ndarray, *mask: np.ndarray, scale: float, max_bias: float) -> np.ndarray:
    z = as_four(x) * scale
    n_batch, n_head = z.shape[:2]
    if mask:
        m = as_four(mask[0])
        m = np.tile(m, (n_batch // m.shape[0], n_head // m.shape[1], 1, 1))
        z = z + alibi_slopes(n_head, max_bias)[:, None, None] * m
    top = z.max(axis=-1, keepdims=True)
    e = np.exp(z - np.where(np.isinf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return np.asarray((e / np.where(total == 0, 1, total)).reshape(x.shape))


def _soft_max_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = soft_max_back(dy, node, node.params["scale"])
    return (dx, *(None for _ in node.src[1:]))


def _soft_max_samples(rng: np.random.Generator) -> Iterator[Sample]:
    plain = {"scale": 1.0, "max_bias": 0.0}
    for shape in [(1, 1), (3, 40)]:
        yield Sample((rng.standard_normal(shape),), plain)
    causal = np.where(np.tri(5, 7, 2, dtype=bool), 0, -np.inf)
    x = rng.standard_normal((2, 6, 5, 7))
    yield Sample((x, causal), {"scale": 0.3, "max_bias": 0.0})
    yield Sample((x, -rng.uniform(0, 3, (2, 3, 5, 7))), {"scale": 0.3, "max_bias": 8.0})


SOFT_MAX = op(
    name="soft_max",
    ggml=GGMLOp.SOFT_MAX,
    spec=_soft_max_spec,
    run=_soft_max_run,
    ref=_soft_max_ref,
    grad=_soft_max_grad,
    samples=_soft_max_samples,
    memory=Memory.INPLACE,
    needs=PLAIN,
)

# -- soft_max_back ------------------------------------------------------------------------------


def _soft_max_back_spec(dy: Tensor, y: Tensor, scale: float) -> Spec:
    expect_type("soft_max_back", "dy", dy)
    expect("soft_max_back", "y", y, dy.shape)
    return Spec(dy.shape)


@kernel
def _soft_max_back_row(dx, dy, y, scale):
    along = _ZERO
    for j in range(y.size):
        along += y[j] * dy[j]
    for j in range(y.size):
        dx[j] = scale * y[j] * (dy[j] - along)


@parallel
def _soft_max_back(dx, dy, y, scale):
    for i in prange(y.shape[0]):
        _soft_max_back_row(dx[i], dy[i], y[i], scale)


def _soft_max_back_ref(dy: np.ndarray, y: np.ndarray, scale: float) -> np.ndarray:
    return np.asarray(scale * y * (dy - np.sum(y * dy, axis=-1, keepdims=True)))


def _soft_max_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 40), (2, 3, 4, 5)]:
        dy, y = rng.standard_normal(shape), rng.dirichlet(np.ones(shape[-1]), shape[:-1])
        yield Sample((dy, y), {"scale": 0.5})


SOFT_MAX_BACK = op(
    name="soft_max_back",
    ggml=GGMLOp.SOFT_MAX_BACK,
    spec=_soft_max_back_spec,
    run=rows(_soft_max_back),
    ref=_soft_max_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_soft_max_back_samples,
    memory=Memory.INPLACE,
    needs=PLAIN,
)
