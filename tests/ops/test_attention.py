"""Attention with caps, sinks, masks and ALiBi against ops that are put together."""

import numpy as np
import pytest
from derivatives import gradients_of

from pyggml import ops
from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.errors import NoGradientError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import I32
from pyggml.graph.tensor import leaf, zeros
from pyggml.kernels.attention import unfused
from pyggml.kernels.attention.unfused import SCORE_ROWS
from pyggml.runtime import run


def numbers(rng, *shape):
    return leaf(rng.standard_normal(shape).astype(np.float32))


def causal(n_queries, n_keys, width=10**6):
    last = np.arange(n_keys - n_queries, n_keys) + 1
    span = np.stack([np.maximum(last - width, 0), last], axis=1)
    return leaf(span.astype(np.int32), "span")


def composed(q, k, v, span, scale, cap):
    """softmax(cap · tanh(scale/cap · q·kᵀ) + mask)·v of ops that store every score."""
    j = np.arange(k.shape[0])
    seen = (span.data[:, :1] <= j) & (j < span.data[:, 1:])
    mask = leaf(np.where(seen, 0, -np.inf).astype(np.float32))
    q, k, v = (ops.permute(t, (1, 0, 2)) for t in (q, k, v))
    scores = ops.scale(ops.mul_mat(k, q), scale / cap)
    p = ops.soft_max(ops.scale(ops.tanh(scores), cap), mask)
    return ops.permute(ops.mul_mat(ops.transpose(v), p), (1, 0, 2))


@pytest.mark.parametrize("n, heads, width", [(3, 1, 99), (61, 2, 20), (SCORE_ROWS + 9, 4, 10**6)])
def test_a_cap_is_what_tanh_between_two_scales_is(rng, n, heads, width):
    q, k, v = numbers(rng, n, heads, 16), numbers(rng, n, 1, 16), numbers(rng, n, 1, 16)
    span, seed = causal(n, n, width), numbers(rng, n, heads, 16)
    fused = ops.flash_attn_ext(q, k, v, span, 0.7, logit_softcap=1.7)
    plain = composed(q, k, v, span, 0.7, 1.7)
    results = [run(out, *gradients_of(out, [q, k, v], seed)) for out in (fused, plain)]
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_without_extras_it_is_flash_attention(rng, monkeypatch):
    q, k, v = numbers(rng, 70, 4, 24), numbers(rng, 70, 2, 24), numbers(rng, 70, 2, 24)
    out, seed = ops.flash_attn_ext(q, k, v, causal(70, 70, 30), 0.2), numbers(rng, 70, 4, 24)
    outputs = out, *gradients_of(out, [q, k, v], seed)
    served = run(*outputs)
    monkeypatch.setattr("pyggml.kernels.attention.forward_path", lambda problem: unfused.FORWARD)
    monkeypatch.setattr("pyggml.kernels.attention.backward_path", lambda problem: unfused.BACKWARD)
    for wanted, found in zip(served, run(*outputs), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("d, dv", [(576, 512), (320, 256), (192, 128), (32, 96)])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_values_of_another_size_than_keys(rng, n, d, dv):
    """As latent attention has them, all queries on one key head: result and gradients."""
    q, k, v = numbers(rng, n, 4, d), numbers(rng, n + 9, 1, d), numbers(rng, n + 9, 1, dv)
    span, seed = causal(n, n + 9), numbers(rng, n, 4, dv)
    fused = ops.flash_attn_ext(q, k, v, span, d**-0.5)
    wanted = composed(q, k, v, span, d**-0.5, 1e4)
    assert fused.shape == (n, 4, dv)
    outputs = [[o, *gradients_of(o, [q, k, v], seed)] for o in (fused, wanted)]
    for found, other in zip(*(run(*o) for o in outputs), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=2e-5)


def test_a_mask_of_halves_is_that_of_floats(rng):
    q, k, v = numbers(rng, 5, 4, 8), numbers(rng, 9, 2, 8), numbers(rng, 9, 2, 8)
    half = leaf(rng.standard_normal((2, 5, 9)).astype(np.float16))
    wide = leaf(half.data.astype(np.float32))
    outputs = [ops.flash_attn_ext(q, k, v, causal(5, 9), 0.4, mask=m) for m in (half, wide)]
    found, wanted = run(*outputs)
    np.testing.assert_array_equal(found, wanted)
    for one, other in zip(*(run(*gradients_of(o, [q, k, v])) for o in outputs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_alibi_needs_no_mask_where_attention_is_causal(rng):
    q, k, v, span = *(numbers(rng, 21, 6, 8) for _ in "qkv"), causal(21, 21)
    far = np.arange(21)[None] - np.arange(21)[:, None]
    mask = leaf(np.where(far <= 0, far, -np.inf).astype(np.float32))
    found, wanted = run(
        ops.flash_attn_ext(q, k, v, span, 0.3, max_bias=8.0),
        ops.flash_attn_ext(q, k, v, span, 0.3, max_bias=8.0, mask=mask),
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_query_alone_gives_what_it_gives_among_others(rng):
    """The way for few queries against the way through products, each extra in use."""
    q, k, v = numbers(rng, 30, 4, 16), numbers(rng, 30, 2, 16), numbers(rng, 30, 2, 16)
    mask, sinks = numbers(rng, 30, 30), numbers(rng, 4)
    extras = {"logit_softcap": 3.0, "sinks": sinks, "max_bias": 4.0}
    (together,) = run(ops.flash_attn_ext(q, k, v, causal(30, 30), 0.5, mask=mask, **extras))
    for i in (0, 29):
        own = leaf(q.data[i : i + 1]), k, v, leaf(causal(30, 30).data[i : i + 1])
        row = leaf(mask.data[i : i + 1])
        (alone,) = run(ops.flash_attn_ext(*own, 0.5, mask=row, **extras))
        np.testing.assert_allclose(alone[0], together[i], atol=1e-6)


@pytest.mark.parametrize("n", [2, 40])
def test_a_sink_far_above_every_score_takes_everything_and_one_far_below_nothing(rng, n):
    q, k, v = (numbers(rng, n, 2, 8) for _ in "qkv")
    sinks = leaf(np.array([80, -np.inf], np.float32))
    found, wanted = run(
        ops.flash_attn_ext(q, k, v, causal(n, n), 1.0, sinks=sinks),
        ops.flash_attn_ext(q, k, v, causal(n, n), 1.0),
    )
    np.testing.assert_allclose(found[:, 0], 0, atol=1e-20)
    np.testing.assert_allclose(found[:, 1], wanted[:, 1], atol=1e-6)


@pytest.mark.parametrize("n", [2, 40])
def test_a_row_masked_whole_is_zero_and_has_no_gradient(rng, n):
    q, k, v = (numbers(rng, n, 2, 8) for _ in "qkv")
    mask = zeros((n, n))
    mask.data[1] = -np.inf
    out = ops.flash_attn_ext(q, k, v, causal(n, n), 1.0, mask=mask)
    found, dq = run(out, *gradients_of(out, [q]))
    assert not found[1].any() and not dq[1].any()
    assert np.isfinite(found).all() and np.isfinite(dq).all() and found[0].any()


def test_scores_are_never_held_for_all_queries():
    """2048 queries of 8 heads on 2048 keys: 128 MiB of scores, of which a few are there at once."""
    q, k, v = zeros((2048, 8, 32)), zeros((2048, 8, 32)), zeros((2048, 8, 32))
    out = ops.flash_attn_ext(q, k, v, causal(2048, 2048), 1.0, logit_softcap=50.0)
    grads = gradients_of(out, [q, k, v], zeros(out.shape))
    assert plan(Graph.of(*grads), CPU()).n_bytes < 32 * 2**20


@pytest.mark.parametrize("n", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("extras", [{}, {"logit_softcap": 2.0}])
def test_halves_are_read_as_the_floats_that_they_are(rng, n, extras):
    """Few queries and many, late in a cache whose end is not filled."""
    k, v = (leaf(rng.standard_normal((90, 2, 24)).astype(np.float16)) for _ in "kv")
    for side in (k, v):
        side.data[70:] = np.nan
    wide = (leaf(side.data.astype(np.float32)) for side in (k, v))
    q, span = numbers(rng, n, 6, 24), causal(n, 70, 33)
    found, wanted = run(
        ops.flash_attn_ext(q, k, v, span, 0.3, **extras),
        ops.flash_attn_ext(q, *wide, span, 0.3, **extras),
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("extras", [{}, {"logit_softcap": 2.0}])
@pytest.mark.parametrize("kinds", [("f2", "f2"), ("f4", "f2"), ("f2", "f4")])
def test_halves_have_no_gradient(rng, extras, kinds):
    q, k, v = numbers(rng, 5, 2, 8), *(leaf(np.zeros((5, 2, 8), kind)) for kind in kinds)
    out = ops.flash_attn_ext(q, k, v, causal(5, 5), 1.0, **extras)
    with pytest.raises(NoGradientError, match="has no gradient for its source 0"):
        gradients_of(out, [q])


def test_keys_and_values_are_of_types_that_are_unpacked(rng):
    q, k, half = *(numbers(rng, 5, 2, 8) for _ in "qk"), leaf(np.zeros((5, 2, 8), np.float16))
    whole = zeros((5, 2, 8), I32)
    for sides, which in (((q, k, whole), "v"), ((q, whole, k), "k")):
        with pytest.raises(ShapeError, match=f"{which} is .*I32.*which cannot be unpacked"):
            ops.flash_attn_ext(*sides, causal(5, 5), 1.0)
    with pytest.raises(ShapeError, match="wanted q in F32"):
        ops.flash_attn_ext(half, half, half, causal(5, 5), 1.0)


Q, SPAN = zeros((5, 4, 8)), causal(5, 5)


@pytest.mark.parametrize(
    "extras, sentence",
    [
        ({"mask": zeros((5, 4))}, "mask is .*wanted .n, .5, 5"),
        ({"mask": zeros((3, 5, 5))}, "n dividing 4 heads"),
        ({"sinks": zeros((5,))}, "sinks is .*wanted F32.4."),
        ({"logit_softcap": -1.0}, "logit_softcap is -1.0"),
    ],
)
def test_misfits_are_refused(extras, sentence):
    with pytest.raises(ShapeError, match=sentence):
        ops.flash_attn_ext(Q, Q, Q, SPAN, 1.0, **extras)
