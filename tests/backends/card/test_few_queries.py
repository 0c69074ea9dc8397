"""Attention of few queries: the parts of the keys are joined, and in a second run joined again."""

import numpy as np
import pytest

from pyggml.backends import CPU, write
from pyggml.graph import Graph
from pyggml.ops import flash_attn_ext
from pyggml.schedule import Devices, bind, schedule
from pyggml.tensors import leaf

N_KEYS, N_HEADS, N_KEY_HEADS, SIZE = 41, 4, 2, 6


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_parts_of_the_keys_are_joined(card, has_sinks):
    rng = np.random.default_rng(2)

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    q = leaf(numbers(2, N_HEADS, SIZE))
    k, v = (leaf(numbers(N_KEYS, N_KEY_HEADS, SIZE).astype(np.float16)) for _ in "kv")
    span = leaf(np.array([[0, 37], [3, 5]], np.int32))
    sinks = leaf(numbers(N_HEADS)) if has_sinks else None
    graph = Graph.of(flash_attn_ext(q, k, v, span, 0.7, sinks=sinks))
    (found,) = bind(schedule(graph, Devices([card, CPU()])))
    (wanted,) = bind(schedule(graph, Devices([CPU()])))
    for _ in range(2):
        found(), wanted()
        (o,) = graph.outputs
        np.testing.assert_allclose(found.read(o), wanted.read(o), rtol=1e-5, atol=1e-6)
        write(q, numbers(2, N_HEADS, SIZE))
