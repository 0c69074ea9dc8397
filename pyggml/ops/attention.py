"""Fused attention with exact gradients and no (n_queries, n_keys) matrix.

flash_attn_ext(q, k, v, span)   o_i = Σ_j softmax_j(scale · q_i·k_j) v_j, span_i0 <= j < span_i1
flash_attn_back                 dq, dk, dv; δ_i = do_i·o_i, ds = p·(do·v − δ)
                                (with caps, sinks or a mask: pyggml.ops.attention_dense)

A query sees one range of keys. That covers causal masks, sliding windows, several sequences laid
one after the other in a batch, and a cache filled so far; memory is linear in the tokens.
The unfused twin is soft_max between two mul_mats.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from pyggml import threads
from pyggml.attention import decode, flash, plain, tiles, widen
from pyggml.backends.cpu import Compute, Site, cpu_kernel
from pyggml.call import Call
from pyggml.dtypes import F16, F32
from pyggml.errors import ShapeError
from pyggml.gemm import CHOSEN, rounds
from pyggml.ggml_enums import GGMLOp
from pyggml.op import Memory, NoGrad, Sample, Spec, op
from pyggml.ops.attention_dense import attention_dense
from pyggml.ops.expect import expect_attention
from pyggml.tensor import Tensor, leaf


def flash_attn_ext(
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
    """Attention of q (T, H, D) over k and v (S, HK, D) -> (T, H, D) (ggml FLASH_ATTN_EXT).

    span (T, 2) int32 holds the first key that a query sees and the one past the last; a query that
    sees none yields zeros. Head h uses key head h // (H / HK). F32, but k and v may both be F16, as
    a cache keeps them: they are widened, and there is no gradient then.
    logit_softcap c > 0 makes a score s into c·tanh(s / c). mask (T, S) or (n, T, S), n dividing H,
    is added to the scores of head h as mask[h % n]; it has no gradient. max_bias > 0 is ALiBi: it
    weighs the mask, or without one the distance from the last key seen, by each head's slope.
    sinks (H,) take part in the softmax's sum with a score of their own; they have a gradient.
    Raises ShapeError if the shapes or types do not fit together.
    """
    if not logit_softcap and not max_bias and mask is None and sinks is None:
        return FLASH_ATTN_EXT(q, k, v, span, scale=scale)
    return attention_dense(
        *(q, k, v, span, scale),
        logit_softcap=logit_softcap,
        max_bias=max_bias,
        mask=mask,
        sinks=sinks,
    )


def _flash_spec(q: Tensor, k: Tensor, v: Tensor, span: Tensor, *, scale: float) -> Spec:
    expect_attention("flash_attn_ext", q, k, v, span, F32, F16)
    return Spec(q.shape)


def _scores(q: np.ndarray, k: np.ndarray, span: np.ndarray, scale: float) -> np.ndarray:
    """Probabilities (H, T, S) in float64."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    s = np.einsum("thd,shd->hts", q, k) * scale
    j = np.arange(k.shape[0])
    seen = (span[:, :1] <= j) & (j < span[:, 1:])
    s = np.where(seen, s, -1e300)
    p = np.where(seen, np.exp(s - s.max(-1, keepdims=True)), 0)
    return p / np.maximum(p.sum(-1, keepdims=True), 1e-300)


def _span(span: np.ndarray) -> np.ndarray:
    return span.astype(np.int64)


def _tiled(n_queries: int) -> bool:
    """Tiles pay off when they are full; without the JIT there are none."""
    return CHOSEN.name != "numpy" and n_queries >= CHOSEN.mr


class _Carver:
    """Cuts a node's scratch into float32 arrays."""

    def __init__(self, work: np.ndarray, pairs: bool) -> None:
        self.floats, self.at, self.pairs = work.view(np.float32), 0, pairs

    def take(self, *shape: int) -> np.ndarray:
        n = int(np.prod(shape))
        piece = self.floats[self.at : self.at + n].reshape(shape)
        self.at += n
        return piece

    def rows(self, x: Tensor) -> np.ndarray:
        return self.take(*tiles.rows_shape(x.shape[1], x.shape[0], x.shape[2], self.pairs))

    def columns(self, x: Tensor) -> np.ndarray:
        return self.take(*tiles.columns_shape(x.shape[1], x.shape[0], x.shape[2], self.pairs))


def _rows_floats(x: Tensor) -> int:
    return prod(tiles.rows_shape(x.shape[1], x.shape[0], x.shape[2], pairs=False))


def _columns_floats(x: Tensor) -> int:
    """However x is computed: pairs take half, but are rounded up."""
    t, h, d = x.shape
    return max(prod(tiles.columns_shape(h, t, d, pairs)) for pairs in (False, True))


# -- flash_attn_ext -----------------------------------------------------------------------------


def _flash_scratch(node: Tensor, compute: Compute) -> int:
    q, k, v = node.src[:3]
    wide = widen.n_floats(k, v)
    if CHOSEN.name == "numpy":
        return 4 * wide
    if not _tiled(q.shape[0]):
        return 4 * prod(decode.parts_shape(q.shape, k.shape))
    copies = _columns_floats(k) + _rows_floats(k)
    return 4 * (wide + copies + threads.most() * flash.forward_floats(q.shape[2]))


def _flash_run(site: Site) -> Call:
    q, k, v, span = site.src
    (lse,) = site.saved
    scale = np.float32(site.node.params["scale"])
    carve = _Carver(site.scratch, pairs=False)
    if CHOSEN.name != "numpy" and not _tiled(q.shape[0]):
        parts = carve.take(*decode.parts_shape(q.shape, k.shape))
        return decode.forward(site.out, lse, q, k, v, span, scale, parts)
    wide_k, wide_v = widen.widened((k, v), carve.take(widen.n_floats(*site.node.src[1:3])))
    if CHOSEN.name == "numpy":
        call = Call(plain.forward, site.out, lse, q, wide_k, wide_v, span, scale)
    else:
        sides = carve.columns(site.node.src[1]), carve.rows(site.node.src[2])
        scratch = carve.take(threads.most(), flash.forward_floats(q.shape[2]))
        call = flash.forward(site.out, lse, q, wide_k, wide_v, span, scale, *sides, scratch)
    return widen.after_widening(span, (k, v), (wide_k, wide_v), call)


def _flash_ref(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, span: np.ndarray, *, scale: float
) -> np.ndarray:
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    return np.einsum("hts,shd->thd", _scores(q, k, _span(span), scale), v)


def _flash_saved(q: Tensor, *_: Tensor, scale: float) -> tuple[Spec, ...]:
    return (Spec((q.shape[1], q.shape[0])),)  # lse


def _flash_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    if node.src[1].dtype is F16:  # a cache: nothing is learned from it
        return (None,) * len(node.src)
    dq = FLASH_ATTN_BACK(*node.src, node, node.saved[0], dy, **node.params)
    return dq, *dq.saved, None


def _flash_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for t, s, h, hk, d in (
        (1, 3, 2, 1, 4),
        (5, 5, 2, 2, 8),
        (29, 29, 4, 2, 20),
        (150, 150, 2, 1, 64),
    ):
        q, k, v = (rng.standard_normal(x) for x in ((t, h, d), (s, hk, d), (s, hk, d)))
        last = np.arange(s - t, s) + 1
        causal = np.stack([np.zeros(t), last], axis=1)
        window = np.stack([np.maximum(last - 7, 0), last], axis=1)
        window[0] = 0  # a query that sees nothing
        for span in (causal, window):
            params = {"scale": d**-0.5}
            yield Sample((q, k, v, span.astype(np.int32)), params)
            in_cache = (leaf(a.astype(np.float16)) for a in (k, v))
            yield Sample((q, *in_cache, span.astype(np.int32)), params)


FLASH_ATTN_EXT = op(
    name="flash_attn_ext",
    ggml=GGMLOp.FLASH_ATTN_EXT,
    spec=_flash_spec,
    ref=_flash_ref,
    grad=_flash_grad,
    samples=_flash_samples,
    memory=Memory.FRESH,
    saved=_flash_saved,
    costly=True,
    fuses=("mul_mat", "soft_max", "mul_mat"),
)
cpu_kernel(FLASH_ATTN_EXT, _flash_run, scratch=_flash_scratch)

# -- flash_attn_back ----------------------------------------------------------------------------


def _back_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    scale: float,
) -> Spec:
    expect_attention("flash_attn_back", q, k, v, span, F32)
    if do.shape != q.shape or o.shape != q.shape:
        raise ShapeError(f"flash_attn_back: o {o.shape} and do {do.shape}, wanted {q.shape}")
    return Spec(q.shape)


def _back_saved(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, scale: float) -> tuple[Spec, ...]:
    return Spec(k.shape), Spec(v.shape)


def _back_scratch(node: Tensor, compute: Compute) -> int:
    q, k = node.src[:2]
    if not _tiled(q.shape[0]):
        return 0
    copies = _rows_floats(k) + 2 * _columns_floats(k)
    sums = prod(flash.sums_shape(q.shape, k.shape))
    return 4 * (copies + sums + threads.most() * flash.backward_floats(q.shape[2]))


def _back_run(site: Site) -> Call:
    q, k, v, span, o, lse, do = site.src
    scale = np.float32(site.node.params["scale"])
    dk, dv = site.saved
    if not _tiled(q.shape[0]):
        return Call(plain.backward, site.out, dk, dv, q, k, v, span, o, lse, do, scale)
    pairs = rounds(site.compute)
    carve = _Carver(site.scratch, pairs)
    k_node, v_node = site.node.src[1:3]
    sides = carve.columns(k_node), carve.rows(k_node), carve.columns(v_node)
    sums = carve.take(*flash.sums_shape(q.shape, k.shape))
    scratch = carve.take(threads.most(), flash.backward_floats(q.shape[2]))
    grads, saved = (site.out, dk, dv), (q, k, v, span, o, lse, do)
    return flash.backward(*grads, *saved, scale, pairs, *sides, sums, scratch)


def _back_ref(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    span: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """dq alone; dk and dv are checked through flash_attn_ext's gradient."""
    repeats = q.shape[1] // k.shape[1]
    p = _scores(q, k, _span(span), scale)
    dp = np.einsum("thd,shd->hts", do, np.repeat(v, repeats, axis=1))
    delta = np.einsum("thd,thd->ht", do, _flash_ref(q, k, v, span, scale=scale))
    return scale * np.einsum("hts,shd->thd", p * (dp - delta[..., None]), np.repeat(k, repeats, 1))


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _flash_samples(rng):
        if any(isinstance(a, Tensor) for a in s.arrays):
            continue
        q, k, v, span = (np.asarray(a) for a in s.arrays)
        scale = s.params["scale"]
        kk = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        scores = np.einsum("thd,shd->hts", q, kk) * scale
        j = np.arange(k.shape[0])
        seen = (span[:, :1] <= j) & (j < span[:, 1:])
        total = np.where(seen, np.exp(scores), 0).sum(-1)
        lse = np.where(total > 0, np.log(np.maximum(total, 1e-300)), 1e30)
        o = _flash_ref(q, k, v, span, scale=scale)
        yield Sample((q, k, v, span, o, lse, rng.standard_normal(q.shape)), s.params)


FLASH_ATTN_BACK = op(
    name="flash_attn_back",
    ggml=GGMLOp.FLASH_ATTN_BACK,
    spec=_back_spec,
    ref=_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_back_samples,
    memory=Memory.FRESH,
    saved=_back_saved,
    costly=True,
    fuses=("mul_mat", "soft_max", "soft_max_back", "out_prod"),
)
cpu_kernel(FLASH_ATTN_BACK, _back_run, scratch=_back_scratch)
