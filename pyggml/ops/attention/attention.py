"""Fused attention with exact gradients and no (n_queries, n_keys) matrix.

flash_attn_ext(q, k, v, span, …)   o_i = Σ_j p_ij v_j of the softmax p over the keys that i sees
flash_attn_back                    dq, dk, dv and dsinks; δ_i = do_i·o_i, ds = p·(do·v − δ)

    z_ij = cap·tanh(scale·q_i·k_j / cap) + bias      (without a cap: scale·q_i·k_j + bias)
    p_ij = e^z_ij / (Σ_j e^z_ij + e^sink)            span_i0 <= j < span_i1

Each query sees one range of keys. Ranges express causal masks, sliding windows, several sequences
in one row of tokens, and a cache filled in part. Memory is linear in the number of tokens.

pyggml.kernels.attention.table chooses the CPU's kernel. The unfused twin is soft_max between two
mul_mats.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import DTYPES, F16, F32, DType
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor, leaf
from pyggml.jit import kernel
from pyggml.jit.tasks import code_for, gate, launch, tuple_stage
from pyggml.kernels import attention
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.attention.positions import alibi_slopes
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_attention, expect_number, expect_type
from pyggml.ops.layout.cpy import cpy
from pyggml.quants import QUANTS, quantize


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
    longest: int = 0,
    may_round: bool = False,
) -> Tensor:
    """(T, H, DV): attention of q (T, H, D) over k (S, HK, D), v (S, HK, DV) (ggml FLASH_ATTN_EXT).

    span (T, 2) int32 holds the first key that a query sees and the one past the last; a query that
    sees none yields zeros. The kernel raises PyggmlError for a span that reaches out of the keys.
    Head h uses key head h // (H / HK). All are F32. k and v may each be of any other type, as in a
    cache; the op then has no gradient. The mask may be F16.
    logit_softcap c > 0 turns a score s into c·tanh(s / c) (Gemma 2, arXiv:2408.00118). mask (T, S)
    or (n, T, S), n dividing H, is added to the scores of head h as mask[h % n]; it has no gradient.
    max_bias > 0 is ALiBi: each head's slope multiplies the mask, or without a mask the distance
    from the last key seen. sinks (H,) are scores without a value: they enter the softmax's sum
    alone (gpt-oss, arXiv:2508.10925). They have a gradient.
    longest: the most keys from the first to the last that queries of one of several sequences see;
    0 for one. may_round: whether compute types that round may do so. Raises ShapeError.
    """
    if mask is not None and mask.dtype is F16:
        mask = cpy(mask, F32)
    extras = tuple(t for t in (mask, sinks) if t is not None)
    return FLASH_ATTN_EXT(
        *(q, k, v, span, *extras),
        scale=scale,
        cap=logit_softcap,
        max_bias=max_bias,
        masked=mask is not None,
        longest=longest,
        may_round=may_round,
    )


def may_round(node: Tensor) -> Tensor:
    """flash_attn_ext's node anew, which may round what it multiplies."""
    return FLASH_ATTN_EXT(*node.src, **{**node.params, "may_round": True})


def _extras(extras: tuple[Any, ...], masked: bool) -> tuple[Any, Any]:
    """The optional last sources as (mask, sinks), None for an absent one."""
    return (*extras, None)[:2] if masked else (None, *extras, None)[:2]


def _per_head(mask: np.ndarray) -> np.ndarray:
    """([n,] T, S) as (n, T, S)."""
    return mask.reshape(-1, *mask.shape[-2:])


# -- what the CPU runs --------------------------------------------------------------------------


def _problem(
    q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor, ...], params: Any, compute: Compute
) -> attention.AttentionProblem:
    (n_queries, n_heads, _), (n_keys, n_key_heads, head_size) = q.shape, k.shape
    return attention.AttentionProblem(
        n_queries=n_queries,
        n_heads=n_heads,
        n_keys=n_keys,
        n_key_heads=n_key_heads,
        head_size=head_size,
        value_size=v.shape[2],
        key_type=k.dtype,
        value_type=v.dtype,
        has_extras=bool(extras or params["cap"] or params["max_bias"]),
        compute=compute,
        may_round=params.get("may_round", False),
        longest=0 if params["masked"] else params["longest"],
    )


def _sources(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, span: np.ndarray, extras: tuple[np.ndarray, ...],
    params: Any,
) -> dict[str, Any]:  # fmt: skip
    """The fields of attention.Forward that are given."""
    mask, sinks = _extras(extras, params["masked"])
    n_heads = q.shape[1]
    unbiased = mask is None and not params["max_bias"]
    slopes = np.zeros(n_heads) if unbiased else alibi_slopes(n_heads, params["max_bias"])
    return {
        **{"q": q, "k": k, "v": v, "span": span},
        "scale": np.float32(params["scale"]),
        "cap": np.float32(params["cap"]),
        "mask": np.zeros((1, 1, 0), np.float32) if mask is None else _per_head(mask),
        "sinks": np.full(n_heads, -np.inf, np.float32) if sinks is None else sinks,
        "slopes": slopes.astype(np.float32),
    }


def _problem_of(node: Tensor, compute: Compute) -> attention.AttentionProblem:
    q, k, v, _, *extras = node.src
    return _problem(q, k, v, tuple(extras), node.params, compute)


def _scratch(node: Tensor, compute: Compute) -> int:
    problem = _problem_of(node, compute)
    return attention.forward_path(problem).n_bytes(problem)


@kernel
def _first_wrong(span, n_keys, longest):
    """The first query whose span reaches out of the keys or is too long, −1 if there is none."""
    for t in range(span.shape[0]):
        first, end = span[t, 0], span[t, 1]
        if min(first, end) < 0 or max(first, end) > n_keys or end - first > longest:
            return t
    return -1


def _check_task(arguments, task, thread):
    span, n_keys, longest, word = arguments[0]
    word[0] = -1 if _first_wrong(span, n_keys, longest) >= 0 else 0


def _check(span: np.ndarray, n_keys: int, longest: int) -> None:
    """PyggmlError for the first wrong span."""
    wrong = _first_wrong(span, n_keys, longest)
    if wrong >= 0:
        first, end = span[wrong].tolist()
        most = f", of which one query sees {longest} at most" if longest < n_keys else ""
        raise PyggmlError(
            f"flash_attn: query {wrong} sees the keys from {first} to {end}, wanted a range of the "
            f"{n_keys} keys{most}"
        )


def _after_check(call: Call, *spans: Any) -> Call:
    """Check the spans (span, n_keys, longest), then run a kernel that uses them as indices."""
    if call.kernel is not launch:
        return Call(one_by_one, (Call(_check, *spans), call))
    word = np.zeros(1, np.int64)
    check = tuple_stage(code_for(_check_task, (*spans, word)), (*spans, word), 1)
    return Call(launch, check, gate(word, Call(_check, *spans)), *call.arguments)


def _run(site: Site) -> Call:
    problem = _problem_of(site.node, site.compute)
    q, k, v, span, *extras = site.src
    sources = _sources(q, k, v, span, tuple(extras), site.node.params)
    arrays = attention.Forward(**sources, o=site.out, lse=site.saved[0])
    call = attention.forward_path(problem).call(problem, arrays, site.scratch)
    return _after_check(call, span, problem.n_keys, problem.n_seen)


def _back_problem_of(node: Tensor, compute: Compute) -> attention.AttentionProblem:
    q, k, v, _, _, _, _, *extras = node.src
    return _problem(q, k, v, tuple(extras), node.params, compute)


def _back_scratch(node: Tensor, compute: Compute) -> int:
    problem = _back_problem_of(node, compute)
    return attention.backward_path(problem).n_bytes(problem)


def _back_run(site: Site) -> Call:
    problem = _back_problem_of(site.node, site.compute)
    q, k, v, span, o, lse, do, *extras = site.src
    dk, dv, *rest = site.saved
    dsinks = rest[0] if rest else np.zeros(0, np.float32)
    sources = _sources(q, k, v, span, tuple(extras), site.node.params)
    arrays = attention.Backward(
        **sources, o=o, lse=lse, do=do, dq=site.out, dk=dk, dv=dv, dsinks=dsinks
    )
    call = attention.backward_path(problem).call(problem, arrays, site.scratch)
    return _after_check(call, span, problem.n_keys, problem.n_keys)


# -- flash_attn_ext -----------------------------------------------------------------------------


_REFUSES = {"scale": (), "cap": NONE_FROM_ZERO, "max_bias": NONE_FROM_ZERO, "masked": ()}
_REFUSES["longest"] = (-1,)


def _spec(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, *extras: Tensor, scale: float, cap: float,
    max_bias: float, masked: bool, longest: int, may_round: bool = False,
) -> Spec:  # fmt: skip
    expect_attention("flash_attn_ext", q, k, v, span)
    for what, t in (("k", k), ("v", v)):
        if t.dtype.name not in QUANTS:
            raise ShapeError(f"flash_attn_ext: {what} is {t!r}, which cannot be unpacked")
    mask, sinks = _extras(extras, masked)
    expect_number("flash_attn_ext", "logit_softcap", cap)
    expect_number("flash_attn_ext", "max_bias", max_bias)
    expect_number("flash_attn_ext", "longest", longest)
    if mask is not None:
        expect_type("flash_attn_ext", "mask", mask)
        fits = len(mask.shape) in (2, 3) and mask.shape[-2:] == (q.shape[0], k.shape[0])
        if fits and len(mask.shape) == 3:
            fits = mask.shape[0] > 0 and q.shape[1] % mask.shape[0] == 0
        if not fits:
            raise ShapeError(
                f"flash_attn_ext: mask is {mask!r}, wanted [n, ]{q.shape[0]}, {k.shape[0]} with "
                f"n dividing {q.shape[1]} heads"
            )
    if sinks is not None:
        expect("flash_attn_ext", "sinks", sinks, q.shape[1:2])
    return Spec((*q.shape[:2], v.shape[2]))


def _softmax(
    q: np.ndarray, k: np.ndarray, span: np.ndarray, extras: tuple[np.ndarray, ...], *,
    scale: float, cap: float, max_bias: float, masked: bool, longest: int,
    may_round: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """P and 1 − tanh² (H, T, S), and lse (H, T); float64."""
    mask, sinks = _extras(extras, masked)
    span, n_heads = span.astype(np.int64), q.shape[1]
    s = scale * np.einsum("thd,shd->hts", q, np.repeat(k, n_heads // k.shape[1], axis=1))
    z = SOFTCAP(s, cap=cap) if cap else s
    slope = SOFTCAP_BACK(z, np.ones_like(s), cap=cap) if cap else np.ones_like(s)
    j = np.arange(k.shape[0])
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


def _ref(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, span: np.ndarray, *extras: np.ndarray,
    **params: Any,
) -> np.ndarray:  # fmt: skip
    p, *_ = _softmax(q, k, span, extras, **params)
    return np.einsum("hts,shd->thd", p, np.repeat(v, q.shape[1] // v.shape[1], axis=1))


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dv = Pᵀ·dy, dS = P · (dy·vᵀ - Σ dy · y), dq = scale · dS·k, dk = scale · dSᵀ·q"""
    q, k, v, span, *extras = node.src
    if k.dtype is not F32 or v.dtype is not F32:  # a cache, which has no gradient
        return (None,) * len(node.src)
    dq = FLASH_ATTN_BACK(q, k, v, span, node, node.saved[0], dy, *extras, **node.params)
    no_mask = (None,) if node.params["masked"] else ()
    dk, dv, *dsinks = dq.saved
    return dq, dk, dv, None, *no_mask, *dsinks


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    shapes = [(1, 3, 2, 1, 4), (5, 9, 6, 3, 8), (29, 29, 4, 2, 20), (70, 70, 4, 1, 16)]
    for t, s, h, hk, d in (*shapes, (150, 150, 2, 1, 64)):
        q, k, v = (rng.standard_normal(x) for x in ((t, h, d), (s, hk, d), (s, hk, d)))
        last = np.arange(s - t, s) + 1
        causal = np.stack([np.zeros(t), last], axis=1).astype(np.int32)
        window = np.stack([np.maximum(last - 7, 0), last], axis=1).astype(np.int32)
        window[0] = 0  # a query that sees nothing
        plain = {"scale": d**-0.5, "cap": 0.0, "max_bias": 0.0, "masked": False, "longest": 0}
        for span in (causal, window):
            yield Sample((q, k, v, span), plain)
            in_cache = (leaf(a.astype(np.float16)) for a in (k, v))
            yield Sample((q, *in_cache, span), plain)
        if t < 150:
            yield from _samples_of_extras(rng, q, k, v, plain)
    yield from _samples_of_other_values(rng)
    yield from _samples_in_cache(rng)


def _samples_of_other_values(rng: np.random.Generator) -> Iterator[Sample]:
    """Values longer and shorter than keys, as with latent attention."""
    for t, s, h, hk, d, dv in ((3, 9, 4, 1, 24, 17), (33, 40, 4, 2, 8, 20), (2, 5, 2, 1, 192, 128)):
        q, k, v = (rng.standard_normal(x) for x in ((t, h, d), (s, hk, d), (s, hk, dv)))
        span = np.stack([np.zeros(t), np.arange(s - t, s) + 1], axis=1).astype(np.int32)
        plain = {"scale": d**-0.5, "cap": 0.0, "max_bias": 0.0, "masked": False, "longest": 0}
        yield Sample((q, k, v, span), plain)
        yield from _samples_of_extras(rng, q, k, v, plain)


def _samples_in_cache(rng: np.random.Generator) -> Iterator[Sample]:
    """Keys and values of several types, also of two, and of two sizes."""
    kinds = ("BF16", "BF16"), ("Q8_0", "Q4_0"), ("Q5_1", "F16"), ("F32", "Q4_1"), ("IQ4_NL", "Q5_0")
    for t, (of_k, of_v) in zip((1, 2, 3, 40, 9), kinds, strict=True):
        s, hk = max(7, t + 1), 1 + t // 40
        q, k, v = (rng.standard_normal(x) for x in ((t, 2, 64), (s, hk, 64), (s, hk, 32)))
        span = np.stack([np.zeros(t), np.arange(s - t, s) + 1], axis=1).astype(np.int32)
        plain = {"scale": 0.125, "cap": 0.0, "max_bias": 0.0, "masked": False, "longest": 0}
        keys = _in_type(k, DTYPES[of_k]), _in_type(v, DTYPES[of_v])
        yield Sample((q, *keys, span), plain)
        yield Sample((q, *keys, span), {**plain, "cap": 1.5})


def _in_type(a: np.ndarray, dtype: DType) -> Tensor:
    """A leaf (S, HK, D) of this type."""
    raw = quantize(a.reshape(-1, a.shape[-1]).astype(np.float32), dtype.name)
    return leaf(raw.view(dtype.numpy).reshape(*a.shape[:2], -1), dtype=dtype)


def _samples_of_extras(
    rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray, plain: dict[str, Any]
) -> Iterator[Sample]:
    (t, h, _), s = q.shape, k.shape[0]
    last = np.arange(s - t, s) + 1
    span = np.stack([np.maximum(last - 40, 0), last], axis=1).astype(np.int32)
    span[0] = 0 if t == 1 else span[0]  # a query that sees nothing
    sinks = np.asarray(rng.standard_normal(h))
    mask: np.ndarray = -rng.uniform(0, 2, (2, t, s)) * rng.choice([1, np.inf], (t, s), p=[0.8, 0.2])
    plain = {**plain, "scale": 2 * plain["scale"]}
    yield Sample((q, k, v, span), {**plain, "cap": 1.5})
    yield Sample((q, k, v, span, sinks), {**plain, "max_bias": 8.0 * (t % 2)})
    yield Sample((q, k, v, span, mask), {**plain, "masked": True, "max_bias": 8.0})
    in_cache = (leaf(a.astype(np.float16)) for a in (k, v))
    yield Sample((q, *in_cache, span, sinks), {**plain, "cap": 1.5})
    yield Sample((q, k, v, span, mask[0], sinks), {**plain, "cap": 2.0, "masked": True})


FLASH_ATTN_EXT = op(
    name="flash_attn_ext",
    ggml=GGMLOp.FLASH_ATTN_EXT,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
    refuses=_REFUSES,
    saved=lambda q, *_, **__: (Spec((q.shape[1], q.shape[0])),),
    costly=True,
    fuses=("mul_mat", "soft_max", "mul_mat"),
)
cpu_kernel(FLASH_ATTN_EXT, _run, scratch=_scratch)

# -- flash_attn_back ----------------------------------------------------------------------------


def _back_spec(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    *extras: Tensor, **params: Any,
) -> Spec:  # fmt: skip
    spec = _spec(q, k, v, span, *extras, **params)
    expect_type("flash_attn_back", "k", k)
    expect_type("flash_attn_back", "v", v)
    expect("flash_attn_back", "o", o, spec.shape)
    expect("flash_attn_back", "lse", lse, (q.shape[1], q.shape[0]))
    expect("flash_attn_back", "do", do, spec.shape)
    return Spec(q.shape)


def _back_saved(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    *extras: Tensor, masked: bool, **_: Any,
) -> tuple[Spec, ...]:  # fmt: skip
    """dk, dv and dsinks."""
    sinks = extras[masked:]
    return Spec(k.shape), Spec(v.shape), *(Spec(t.shape) for t in sinks)


def _back_ref(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, span: np.ndarray, o: np.ndarray,
    lse: np.ndarray, do: np.ndarray, *extras: np.ndarray, **params: Any,
) -> np.ndarray:  # fmt: skip
    """dq alone; the others are checked through flash_attn_ext's gradient."""
    repeats = q.shape[1] // k.shape[1]
    p, slope, _ = _softmax(q, k, span, extras, **params)
    dp = np.einsum("thd,shd->hts", do, np.repeat(v, repeats, axis=1))
    delta = np.einsum("thd,thd->ht", do, _ref(q, k, v, span, *extras, **params))
    ds = params["scale"] * p * (dp - delta[..., None]) * slope
    return np.einsum("hts,shd->thd", ds, np.repeat(k, repeats, axis=1))


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        if any(isinstance(a, Tensor) for a in s.arrays):
            continue
        q, k, v, span, *extras = (np.asarray(a) for a in s.arrays)
        o = _ref(q, k, v, span, *extras, **s.params)
        lse = _softmax(q, k, span, tuple(extras), **s.params)[2]
        do = rng.standard_normal(o.shape)
        yield Sample((q, k, v, span, o, lse, do, *extras), s.params)


FLASH_ATTN_BACK = op(
    name="flash_attn_back",
    ggml=GGMLOp.FLASH_ATTN_BACK,
    spec=_back_spec,
    ref=_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_back_samples,
    refuses=_REFUSES,
    saved=_back_saved,
    costly=True,
    fuses=("mul_mat", "soft_max", "soft_max_back", "out_prod"),
)
cpu_kernel(FLASH_ATTN_BACK, _back_run, scratch=_back_scratch)
