"""Attention of many queries over a cache of float16, on tensor cores."""

import numpy as np
import pytest

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import open_cuda
from pyggml.backends.cuda.attention import CACHED, path_of
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.ops import flash_attn_ext
from pyggml.runtime import Devices, results

SHAPES = [
    (18 if SIMULATED else 36, 40, 2, 1, 64)
]  # queries, keys, heads, heads of keys, numbers of a head
if not SIMULATED:  # which takes minutes
    SHAPES += [
        (33, 700, 4, 2, 64),
        (130, 333, 6, 2, 128),
        (512, 1100, 8, 4, 128),
        (65, 200, 3, 1, 256),
    ]


@pytest.fixture
def rounding(monkeypatch):
    """A card with products in bfloat16."""
    if SIMULATED:
        from warps import as_instructions

        as_instructions(monkeypatch)
    return open_cuda(0, "bf16")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("cap", "has_sinks"), [(0.0, False), (0.0, True), (2.5, False)])
def test_queries_of_two_sequences_and_of_none(rounding, shape, cap, has_sinks):
    n, n_keys, n_heads, n_key_heads, size = shape
    rng = np.random.default_rng(3)

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    q = leaf(2 * numbers(n, n_heads, size))
    k, v = (leaf(numbers(n_keys, n_key_heads, size).astype(np.float16)) for _ in "kv")
    split = n_keys // 2
    of_first = np.arange(n) < n // 3
    stop = np.where(of_first, 1 + np.arange(n), split + 1 + np.arange(n) * (split - 1) // n)
    span = np.stack([np.where(of_first, 0, split), stop], axis=1).astype(np.int32)
    span[-2:] = split, split  # what fills a pass sees no key
    sinks = leaf(numbers(n_heads)) if has_sinks else None
    node = flash_attn_ext(q, k, v, leaf(span), size**-0.5, sinks=sinks, logit_softcap=cap)
    assert path_of(node, "bf16") is CACHED
    nodes = node, *node.saved
    by_card = results(Graph.of(*nodes), Devices([rounding, CPU()]))
    by_host = results(Graph.of(*nodes), Devices([CPU()]))
    for a, b in zip(by_card, by_host, strict=True):
        np.testing.assert_allclose(a, b, rtol=4e-3, atol=4e-3)
    assert not by_card[0][-2:].any()


def test_queries_beyond_float16(rounding):
    """They are the largest there is, not infinite; what is no number stays none."""
    q = np.full((17, 1, 64), 1e30, np.float32)
    q[3] = np.nan
    k, v = (leaf(np.ones((17, 1, 64), np.float16)) for _ in "kv")
    span = leaf(np.array([[0, i + 1] for i in range(17)], np.int32))
    (o,) = results(Graph.of(flash_attn_ext(leaf(q), k, v, span, 1e-3)), Devices([rounding, CPU()]))
    assert np.isnan(o[3]).all()
    np.testing.assert_array_equal(np.delete(o, 3, axis=0), 1)
