"""Attention with its pattern gives what the fused op gives, in value and gradient."""

import numpy as np
import pytest

from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.graph.dtypes import F16
from pyggml.graph.tensor import leaf
from pyggml.models import Inputs, Net, Taps
from pyggml.models.open_attention import open_attention
from pyggml.ops import cpy, flash_attn_ext, mul, sum_
from pyggml.runtime import results

T, N, N_KV, SIZE, VALUES = 13, 4, 2, 16, 12
SPANS = {
    "causal": [(0, t + 1) for t in range(T)],
    "window": [(max(0, t - 3), t + 1) for t in range(T)],
    "two texts": [(0, t + 1) if t < 6 else (6, t + 1) for t in range(T)],
}
WAYS = {
    "plain": {},
    "soft cap": {"logit_softcap": 2.0},
    "ALiBi": {"max_bias": 8.0},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_it_is_what_the_fused_op_gives(how, span):
    rng = np.random.default_rng(0)
    shapes = (T, N, SIZE), (T, N_KV, SIZE), (T, N_KV, VALUES)
    q, k, v = (
        leaf(rng.standard_normal(s).astype(np.float32), x)
        for s, x in zip(shapes, "qkv", strict=True)
    )
    span = leaf(np.array(span, np.int32))
    if "sinks" in how:
        how = {"sinks": leaf(rng.standard_normal(N).astype(np.float32))}
    weights = leaf(rng.standard_normal((T, N, VALUES)).astype(np.float32))
    net = Net({}, Inputs.empty(T), taps=Taps(["pattern"]))
    both = (
        open_attention(net, "pattern", q, k, v, span, 0.3, **how),
        flash_attn_ext(q, k, v, span, 0.3, **how),
    )
    graphs = [build_backward(Graph.of(loss=sum_(mul(y, weights)), y=y), [q, k, v]) for y in both]
    found, wanted = map(results, graphs)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_keys_of_a_cache_may_be_half_as_long():
    rng = np.random.default_rng(1)
    q = leaf(rng.standard_normal((1, N, SIZE)).astype(np.float32))
    k, v = (leaf(rng.standard_normal((T, N_KV, SIZE)).astype(np.float32)) for _ in range(2))
    span, net = leaf(np.array([[2, 9]], np.int32)), Net({}, Inputs.empty(1), taps=Taps([]))
    half = [cpy(x, F16) for x in (k, v)]
    found, wanted = results(
        Graph.of(
            open_attention(net, "pattern", q, *half, span, 0.3),
            flash_attn_ext(q, k, v, span, 0.3),
        )
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3)
