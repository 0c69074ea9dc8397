"""Rotary positions (Su et al. 2021) with YaRN (Peng et al. 2023), as ggml's ROPE computes them.

    θ     = position · base^(−2i/n_dims) / freq_factor[i],  i < n_dims/2
    angle = θ · (s·(1 − mix) + mix),  s = freq_scale
    mix   = ext_factor · (1 − clip((i − low) / max(0.001, high − low), 0, 1))
    (y_a, y_b) = m · (x_a·cos − x_b·sin, x_a·sin + x_b·cos)

low and high are the dimensions that turn beta_fast and beta_slow times within n_ctx_orig tokens.
m = attn_factor, times 1 + 0.1·ln(1/s) where ext_factor is not 0. The pair (a, b) is (2i, 2i + 1)
in mode "normal" and (i, i + n_dims/2) in mode "neox"; features from n_dims on are copied.

rope_table        positions -> m·cos and m·sin, made once for all layers; angles in float64
rope_apply        y  = the pairs of x turned by a table
rope_apply_back   dx = the pairs of dy turned back (and scaled by m again: the transpose)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, floor, log, pi
from typing import Any

import numpy as np

from pyggml._jit import kernel, parallel, prange
from pyggml.dtypes import I32
from pyggml.errors import ShapeError
from pyggml.ggml_enums import GGMLOp
from pyggml.ops.expect import expect_axes, expect_type
from pyggml.tensor import PLAIN, Call, Memory, NoGrad, Sample, Site, Spec, Tensor, op


def rope(
    x: Tensor,
    positions: Tensor,
    freq_factors: Tensor | None = None,
    *,
    mode: str,
    n_dims: int,
    **scaling: Any,
) -> Tensor:
    """x (n_tokens, n_head, d) or (n_batch, n_tokens, n_head, d) F32, turned by its positions.

    mode is "normal" or "neox"; the rest is rope_table's. Layers that share positions should share
    a table: rope_apply(x, rope_table(positions, …), mode).
    """
    return rope_apply(x, rope_table(positions, freq_factors, n_dims=n_dims, **scaling), mode)


def rope_table(
    positions: Tensor,
    freq_factors: Tensor | None = None,
    *,
    n_dims: int,
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    n_ctx_orig: int = 0,
) -> Tensor:
    """(n_tokens, 2, n_dims/2) F32: for each position a row of cosines and a row of sines.

    positions (n_tokens,) I32; freq_factors (at least n_dims/2,) F32. Raises ShapeError if n_dims
    is odd, or if ext_factor is not 0 and n_ctx_orig, freq_scale or freq_base does not allow YaRN.
    """
    return ROPE_TABLE(
        *(t for t in (positions, freq_factors) if t is not None),
        n_dims=n_dims,
        freq_base=freq_base,
        freq_scale=freq_scale,
        ext_factor=ext_factor,
        attn_factor=attn_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        n_ctx_orig=n_ctx_orig,
    )


def rope_apply(x: Tensor, table: Tensor, mode: str) -> Tensor:
    """x (n_tokens, n_head, d) or (n_batch, n_tokens, n_head, d) F32, turned by a rope_table."""
    return ROPE_APPLY(x, table, neox=_is_neox(mode))


def rope_apply_back(dy: Tensor, table: Tensor, mode: str) -> Tensor:
    """d(loss)/dx of rope_apply, given dy = d(loss)/dy of x's shape."""
    return ROPE_APPLY_BACK(dy, table, neox=_is_neox(mode))


def _is_neox(mode: str) -> bool:
    if mode not in ("normal", "neox"):
        raise ShapeError(f"rope: mode is {mode!r}, wanted 'normal' or 'neox'")
    return mode == "neox"


# -- rope_table ---------------------------------------------------------------------------------


def _rope_table_spec(
    positions: Tensor,
    *factors: Tensor,
    n_dims: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    n_ctx_orig: int,
    **_: float,
) -> Spec:
    expect_type("rope_table", "positions", positions, I32)
    expect_axes("rope_table", "positions", positions, 1)
    if n_dims <= 0 or n_dims % 2:
        raise ShapeError(f"rope_table: n_dims is {n_dims}, wanted an even number above 0")
    for f in factors:
        expect_type("rope_table", "freq_factors", f)
        expect_axes("rope_table", "freq_factors", f, 1)
        if f.shape[0] < n_dims // 2:
            raise ShapeError(f"rope_table: freq_factors is {f!r}, wanted {n_dims // 2} or more")
    if ext_factor and (n_ctx_orig <= 0 or freq_scale <= 0 or freq_base <= 1):
        raise ShapeError(
            f"rope_table: YaRN needs n_ctx_orig > 0, freq_scale > 0 and freq_base > 1, found "
            f"{n_ctx_orig}, {freq_scale} and {freq_base}"
        )
    return Spec((positions.shape[0], 2, n_dims // 2))


def _turning_dim(turns: float, n_dims: int, n_ctx_orig: int, freq_base: float) -> float:
    """The pair, as a real number, that makes this many turns within n_ctx_orig positions."""
    return n_dims * log(n_ctx_orig / (turns * 2 * pi)) / (2 * log(freq_base))


def _frequencies(
    n_dims: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
    n_ctx_orig: int,
) -> tuple[np.ndarray, float]:
    """Radians per position of each pair (n_dims/2,) float64 without freq_factors, and m."""
    i = np.arange(n_dims // 2)
    radians = np.power(float(freq_base), -2.0 * i / n_dims)
    if not ext_factor:
        return radians * freq_scale, attn_factor
    low = max(0, floor(_turning_dim(beta_fast, n_dims, n_ctx_orig, freq_base)))
    high = min(n_dims - 1, ceil(_turning_dim(beta_slow, n_dims, n_ctx_orig, freq_base)))
    mix = ext_factor * (1 - np.clip((i - low) / max(0.001, high - low), 0, 1))
    return radians * (freq_scale * (1 - mix) + mix), attn_factor * (1 + 0.1 * log(1 / freq_scale))


@kernel
def _rope_table(table, positions, radians, factors, m):
    for t in range(table.shape[0]):
        for i in range(table.shape[2]):
            angle = positions[t] * radians[i] / factors[i]
            table[t, 0, i] = m * np.cos(angle)
            table[t, 1, i] = m * np.sin(angle)


def _rope_table_run(site: Site) -> Call:
    radians, m = _frequencies(**site.node.params)
    ones = np.ones(radians.shape, np.float32)
    factors = site.src[1] if len(site.src) > 1 else ones
    return _rope_table, (site.out, site.src[0], radians, factors, float(m))


def _rope_table_ref(positions: np.ndarray, *factors: np.ndarray, **params: float) -> np.ndarray:
    """Pair by pair, in the order of ggml's rope_yarn."""
    n_dims, s, ext = int(params["n_dims"]), params["freq_scale"], params["ext_factor"]
    pairs = []
    for i in range(n_dims // 2):
        extrapolated = positions * params["freq_base"] ** (-2 * i / n_dims)
        if factors:
            extrapolated = extrapolated / factors[0][i]
        theta, m = s * extrapolated, params["attn_factor"]
        if ext != 0:
            low, high = (
                n_dims
                * np.log(params["n_ctx_orig"] / (turns * 2 * pi))
                / (2 * np.log(params["freq_base"]))
                for turns in (params["beta_fast"], params["beta_slow"])
            )
            low, high = max(0, np.floor(low)), min(n_dims - 1, np.ceil(high))
            mix = ext * (1 - min(1, max(0, (i - low) / max(0.001, high - low))))
            theta = theta * (1 - mix) + extrapolated * mix
            m *= 1 + 0.1 * np.log(1 / s)
        pairs.append([m * np.cos(theta), m * np.sin(theta)])
    return np.array(pairs).transpose(2, 1, 0)


def _rope_table_samples(rng: np.random.Generator) -> Iterator[Sample]:
    plain = {
        "n_dims": 8,
        "freq_base": 10000.0,
        "freq_scale": 1.0,
        "ext_factor": 0.0,
        "attn_factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "n_ctx_orig": 0,
    }
    positions = np.array([0, 1, 2, 3, 900], np.int32)
    yield Sample((positions,), plain)
    yield Sample((positions, rng.uniform(1, 8, 5)), {**plain, "freq_scale": 0.125})
    yarn = {"n_dims": 64, "freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": 4096}
    yield Sample((positions,), {**plain, **yarn, "attn_factor": 0.8})


ROPE_TABLE = op(
    name="rope_table",
    ggml=GGMLOp.CUSTOM,
    spec=_rope_table_spec,
    run=_rope_table_run,
    ref=_rope_table_ref,
    grad=NoGrad("positions and frequencies are constants"),
    samples=_rope_table_samples,
    memory=Memory.FRESH,
    needs=PLAIN,
)

# -- rope_apply and its back --------------------------------------------------------------------


def _rotated(name: str) -> Callable[..., Spec]:
    def spec(x: Tensor, table: Tensor, neox: bool) -> Spec:
        expect_type(name, "x", x)
        expect_axes(name, "x", x, 3, 4)
        expect_type(name, "table", table)
        n_tokens, d = x.shape[-3], x.shape[-1]
        fits = len(table.shape) == 3 and table.shape[:2] == (n_tokens, 2)
        if not fits or 2 * table.shape[2] > d:
            raise ShapeError(
                f"{name}: table is {table!r}, wanted ({n_tokens}, 2, at most {d // 2}) for {x!r}"
            )
        return Spec(x.shape)

    return spec


@kernel
def _turn_halves(a, b, cos, sin, sign):
    for i in range(cos.size):
        p, q, s = a[i], b[i], sin[i] * sign
        a[i] = p * cos[i] - q * s
        b[i] = p * s + q * cos[i]


@kernel
def _turn_pairs(y, cos, sin, sign):
    for i in range(cos.size):
        p, q, s = y[2 * i], y[2 * i + 1], sin[i] * sign
        y[2 * i] = p * cos[i] - q * s
        y[2 * i + 1] = p * s + q * cos[i]


@kernel
def _copied(out, x):
    for j in range(x.size):
        out[j] = x[j]


@parallel
def _rotate(y, x, table, neox, sign, in_place):
    """y, x (n_batch · n_tokens, n_head, d). A head is copied, then turned where it lies."""
    half = table.shape[2]
    for t in prange(y.shape[0]):
        cos, sin = table[t % table.shape[0], 0], table[t % table.shape[0], 1]
        for h in range(y.shape[1]):
            head = y[t, h]
            if not in_place:
                _copied(head, x[t, h])
            if neox:
                _turn_halves(head[:half], head[half : 2 * half], cos, sin, sign)
            else:
                _turn_pairs(head, cos, sin, sign)


def _rotation(sign: float) -> Callable[[Site], Call]:
    def run(site: Site) -> Call:
        x, table = site.src
        y = site.out.reshape(-1, *site.out.shape[-2:])
        in_place = x.ctypes.data == y.ctypes.data
        arguments = (y, x.reshape(y.shape), table, *site.scalars, np.float32(sign), in_place)
        return _rotate, arguments

    return run


def _rotate_ref(x: np.ndarray, table: np.ndarray, neox: bool, sign: float) -> np.ndarray:
    half = table.shape[2]
    first = np.arange(half) if neox else 2 * np.arange(half)
    second = first + (half if neox else 1)
    cos, sin = table[:, None, 0], sign * table[:, None, 1]
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def _rope_apply_ref(x: np.ndarray, table: np.ndarray, neox: bool) -> np.ndarray:
    return _rotate_ref(x, table, neox, 1)


def _rope_apply_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    return ROPE_APPLY_BACK(dy, node.src[1], **node.params), None


def _rope_apply_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, half in [((1, 1, 2), 1), ((5, 3, 8), 3), ((2, 4, 3, 32), 16)]:
        angle = rng.uniform(-3, 3, (shape[-3], half))
        table = 1.1 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        for neox in (False, True):
            yield Sample((rng.standard_normal(shape), table), {"neox": neox})


ROPE_APPLY = op(
    name="rope_apply",
    ggml=GGMLOp.ROPE,
    spec=_rotated("rope_apply"),
    run=_rotation(1),
    ref=_rope_apply_ref,
    grad=_rope_apply_grad,
    samples=_rope_apply_samples,
    memory=Memory.INPLACE,
    needs=PLAIN,
)


def _rope_apply_back_ref(dy: np.ndarray, table: np.ndarray, neox: bool) -> np.ndarray:
    return _rotate_ref(dy, table, neox, -1)


def _rope_apply_back_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    return ROPE_APPLY(g, node.src[1], **node.params), None


ROPE_APPLY_BACK = op(
    name="rope_apply_back",
    ggml=GGMLOp.ROPE_BACK,
    spec=_rotated("rope_apply_back"),
    run=_rotation(-1),
    ref=_rope_apply_back_ref,
    grad=_rope_apply_back_grad,
    samples=_rope_apply_samples,
    memory=Memory.INPLACE,
    needs=PLAIN,
)
