"""Attention with what flash_attn_ext's tiles do not know: capped scores, sinks, a mask, ALiBi.

    z   = cap·tanh(scale·q·k / cap) + bias      (without a cap: scale·q·k + bias)
    p_j = e^z_j / (Σ e^z + e^sink),  o = Σ p_j v_j
    ds  = p·(do·v − δ)·(1 − tanh²)·scale,  δ = do·o,  dsink = −Σ e^(sink − lse)·δ

bias is slope·mask, or slope·(j − the last key that the query sees) with ALiBi and no mask: a causal
softmax does not notice what is the same for all keys. The cap is Gemma 2's (arXiv:2408.00118), the
sink one number per head that takes part in the sum and has no value (gpt-oss, arXiv:2508.10925).

Scores exist for a few hundred rows at a time, see pyggml.attention.dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from pyggml.attention import dense, widen
from pyggml.backends.cpu import Compute, Site, cpu_kernel
from pyggml.call import Call
from pyggml.dtypes import F16, F32
from pyggml.errors import ShapeError
from pyggml.ggml_enums import GGMLOp
from pyggml.op import Memory, NoGrad, Sample, Spec, op
from pyggml.ops.expect import expect, expect_attention, expect_type
from pyggml.ops.softmax import alibi_slopes
from pyggml.tensor import Shape, Tensor, leaf

_FEW = 8  # up to so many queries go one row after the other: a product is not worth its start


def attention_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    scale: float,
    *,
    logit_softcap: float = 0.0,
    max_bias: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q (T, H, D) over k and v (S, HK, D) -> (T, H, D); see flash_attn_ext."""
    extras = tuple(t for t in (mask, sinks) if t is not None)
    return ATTENTION_DENSE(
        *(q, k, v, span, *extras),
        scale=scale,
        cap=logit_softcap,
        max_bias=max_bias,
        masked=mask is not None,
    )


def _extras(extras: tuple[Any, ...], masked: bool) -> tuple[Any, Any]:
    """(mask, sinks) of the sources after the span, None for what is absent."""
    return (*extras, None)[:2] if masked else (None, *extras, None)[:2]


def _spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    *extras: Tensor,
    scale: float,
    cap: float,
    max_bias: float,
    masked: bool,
) -> Spec:
    expect_attention("attention_dense", q, k, v, span, F32, F16)
    mask, sinks = _extras(extras, masked)
    if cap < 0 or max_bias < 0:
        raise ShapeError(f"attention_dense: cap {cap}, max_bias {max_bias}, wanted 0 or more")
    if mask is not None:
        expect_type("attention_dense", "mask", mask)
        fits = len(mask.shape) in (2, 3) and mask.shape[-2:] == (q.shape[0], k.shape[0])
        if not fits or (len(mask.shape) == 3 and q.shape[1] % mask.shape[0]):
            raise ShapeError(
                f"attention_dense: mask is {mask!r}, wanted [n, ]{q.shape[0]}, {k.shape[0]} with "
                f"n dividing {q.shape[1]} heads"
            )
    if sinks is not None:
        expect("attention_dense", "sinks", sinks, q.shape[1:2])
    return Spec(q.shape)


def _problem(params: Any, src: tuple[np.ndarray, ...]) -> dense.Problem:
    q, k, v, span, *rest = src
    mask, sinks = _extras(tuple(rest), params["masked"])
    n_heads = q.shape[1]
    plain = mask is None and not params["max_bias"]
    slopes = np.zeros(n_heads) if plain else alibi_slopes(n_heads, params["max_bias"])
    return dense.Problem(
        *(q, k, v, span),
        mask=np.zeros((1, 1, 0), np.float32) if mask is None else _per_head(mask),
        sinks=np.full(n_heads, -np.inf, np.float32) if sinks is None else sinks,
        slopes=slopes.astype(np.float32),
        scale=np.float32(params["scale"]),
        cap=np.float32(params["cap"]),
    )


def _per_head(mask: np.ndarray) -> np.ndarray:
    """([n,] T, S) as (n, T, S)."""
    return mask.reshape(-1, *mask.shape[-2:])


def _carve(work: np.ndarray, n_bytes: int, shapes: list[Shape]) -> list[np.ndarray]:
    """The scratch from byte n_bytes on as float32 arrays of these shapes."""
    floats, pieces = work[n_bytes:].view(np.float32), []
    for shape in shapes:
        pieces.append(floats[: prod(shape)].reshape(shape))
        floats = floats[prod(shape) :]
    return pieces


# -- attention_dense ----------------------------------------------------------------------------


def _scratch(node: Tensor, compute: Compute) -> int:
    q, k = (t.shape for t in node.src[:2])
    if q[0] <= _FEW:
        return 4 * q[0] * q[1] * k[0]
    wide = 4 * widen.n_floats(*node.src[1:3])
    return wide + dense.work_bytes(q, k) + 4 * sum(map(prod, dense.forward_shapes(q, k)))


def _run(site: Site) -> Call:
    q, k, v, span, *extras = site.src
    (lse,) = site.saved
    if len(q) <= _FEW:
        few = q, widen.readable(k), widen.readable(v), span, *extras
        (scores,) = _carve(site.scratch, 0, [(len(q), q.shape[1], len(k))])
        return Call(dense.few, _problem(site.node.params, few), site.out, lse, scores)
    n = widen.n_floats(*site.node.src[1:3])
    wide, work = widen.widened((k, v), site.scratch.view(np.float32)[:n]), site.scratch[4 * n :]
    problem = _problem(site.node.params, (q, *wide, span, *extras))
    n_bytes = dense.work_bytes(q.shape, k.shape)
    scratch = _carve(work, n_bytes, dense.forward_shapes(q.shape, k.shape))
    call = Call(dense.forward, problem, site.out, lse, work[:n_bytes], scratch)
    return widen.after_widening(span, (k, v), wide, call)


def _shares(
    src: tuple[np.ndarray, ...], scale: float, cap: float, max_bias: float, masked: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities and 1 − tanh² (H, T, S), and the logarithms of the sums (H, T); float64."""
    q, k, _, span, *rest = src
    mask, sinks = _extras(tuple(rest), masked)
    s = scale * np.einsum("thd,shd->hts", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1))
    slope = 1 - np.tanh(s / cap) ** 2 if cap else np.ones_like(s)
    z = cap * np.tanh(s / cap) if cap else s
    j, n_heads = np.arange(k.shape[0]), q.shape[1]
    if mask is not None:
        heads = np.arange(n_heads) % len(_per_head(mask))
        z = z + alibi_slopes(n_heads, max_bias)[:, None, None] * _per_head(mask)[heads]
    elif max_bias:
        z = z + alibi_slopes(n_heads, max_bias)[:, None, None] * (j - span[:, 1:] + 1)
    z = np.where((span[:, :1] <= j) & (j < span[:, 1:]), z, -np.inf)
    sink = np.full(n_heads, -np.inf) if sinks is None else sinks
    top = np.maximum(z.max(axis=-1), sink[:, None])
    top = np.where(np.isinf(top), 0, top)
    e = np.exp(z - top[..., None])
    total = np.maximum(e.sum(axis=-1) + np.exp(sink[:, None] - top), 1e-300)
    return e / total[..., None], slope, np.where(total > 1e-300, top + np.log(total), 1e30)


def _ref(*src: np.ndarray, **params: Any) -> np.ndarray:
    q, _, v = src[:3]
    p, *_ = _shares(src, **params)
    return np.einsum("hts,shd->thd", p, np.repeat(v, q.shape[1] // v.shape[1], axis=1))


def _saved(q: Tensor, *_: Tensor, **__: Any) -> tuple[Spec, ...]:
    return (Spec((q.shape[1], q.shape[0])),)  # lse


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    if node.src[1].dtype is F16:
        return (None,) * len(node.src)
    dq = ATTENTION_DENSE_BACK(node, node.saved[0], dy, *node.src, **node.params)
    dk, dv, dsinks = dq.saved
    extras = _extras(node.src[4:], node.params["masked"])
    parts = zip(extras, (None, dsinks), strict=True)
    return dq, dk, dv, None, *(part for source, part in parts if source is not None)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    shapes = [(1, 3, 2, 1, 4), (5, 9, 6, 3, 8), (29, 29, 4, 2, 20), (70, 70, 4, 1, 16)]
    for n, (t, s, h, hk, d) in enumerate(shapes):
        q, k, v = (rng.standard_normal(x) for x in ((t, h, d), (s, hk, d), (s, hk, d)))
        last = np.arange(s - t, s) + 1
        span = np.stack([np.maximum(last - 40, 0), last], axis=1).astype(np.int32)
        span[0] = span[0] if n else 0  # a query that sees nothing
        sinks = rng.standard_normal(h)
        mask = -rng.uniform(0, 2, (2, t, s)) * rng.choice([1, np.inf], (t, s), p=[0.8, 0.2])
        plain = {"scale": 2 * d**-0.5, "cap": 0.0, "max_bias": 0.0, "masked": False}
        yield Sample((q, k, v, span), {**plain, "cap": 1.5})
        yield Sample((q, k, v, span, sinks), {**plain, "max_bias": 8.0 * (n % 2)})
        yield Sample((q, k, v, span, mask), {**plain, "masked": True, "max_bias": 8.0})
        in_cache = (leaf(a.astype(np.float16)) for a in (k, v))
        yield Sample((q, *in_cache, span, sinks), {**plain, "cap": 1.5})
        everything = {"scale": 2 * d**-0.5, "cap": 2.0, "max_bias": 0.0, "masked": True}
        yield Sample((q, k, v, span, mask[0], sinks), everything)


ATTENTION_DENSE = op(
    name="attention_dense",
    ggml=GGMLOp.FLASH_ATTN_EXT,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
    memory=Memory.FRESH,
    saved=_saved,
    costly=True,
)
cpu_kernel(ATTENTION_DENSE, _run, scratch=_scratch)

# -- attention_dense_back -----------------------------------------------------------------------


def _back_spec(o: Tensor, lse: Tensor, do: Tensor, *src: Tensor, **params: Any) -> Spec:
    shape = _spec(*src, **params).shape
    q, k, v, span = src[:4]
    expect_attention("attention_dense_back", q, k, v, span, F32)
    expect("attention_dense_back", "o", o, shape)
    expect("attention_dense_back", "lse", lse, (shape[1], shape[0]))
    expect("attention_dense_back", "do", do, shape)
    return Spec(shape)


def _back_saved(
    o: Tensor, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, *_: Tensor, **__: Any
) -> tuple[Spec, ...]:
    return Spec(k.shape), Spec(k.shape), Spec(q.shape[1:2])


def _back_scratch(node: Tensor, compute: Compute) -> int:
    q, k = (t.shape for t in node.src[3:5])
    return dense.work_bytes(q, k) + 4 * sum(map(prod, dense.backward_shapes(q, k)))


def _back_run(site: Site) -> Call:
    o, lse, do, *src = site.src
    q, k = (a.shape for a in src[:2])
    n_bytes = dense.work_bytes(q, k)
    scratch = _carve(site.scratch, n_bytes, dense.backward_shapes(q, k))
    problem, grads = _problem(site.node.params, tuple(src)), (site.out, *site.saved)
    return Call(dense.backward, problem, grads, o, lse, do, site.scratch[:n_bytes], scratch)


def _back_ref(
    o: np.ndarray, lse: np.ndarray, do: np.ndarray, *src: np.ndarray, **params: Any
) -> np.ndarray:
    """dq alone; the others are checked through attention_dense's gradient."""
    q, k, v = src[:3]
    repeats = q.shape[1] // k.shape[1]
    p, slope, _ = _shares(src, **params)
    dp = np.einsum("thd,shd->hts", do, np.repeat(v, repeats, axis=1))
    delta = np.einsum("thd,thd->ht", do, _ref(*src, **params))
    ds = params["scale"] * p * (dp - delta[..., None]) * slope
    return np.einsum("hts,shd->thd", ds, np.repeat(k, repeats, axis=1))


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        if any(isinstance(a, Tensor) for a in s.arrays):
            continue
        src = tuple(np.asarray(a) for a in s.arrays)
        lse = _shares(src, **s.params)[2]
        do = rng.standard_normal(src[0].shape)
        yield Sample((_ref(*src, **s.params), lse, do, *src), s.params)


ATTENTION_DENSE_BACK = op(
    name="attention_dense_back",
    ggml=GGMLOp.FLASH_ATTN_BACK,
    spec=_back_spec,
    ref=_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_back_samples,
    memory=Memory.FRESH,
    saved=_back_saved,
    costly=True,
)
cpu_kernel(ATTENTION_DENSE_BACK, _back_run, scratch=_back_scratch)
