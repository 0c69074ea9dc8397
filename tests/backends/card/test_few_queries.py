"""Attention of few queries: the parts of the keys are joined, and in a second run joined again."""

import numpy as np
import pytest

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda.attention import decode
from pyggml.backends.cuda.code.cluster_ptx import has_clusters
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.tensor import leaf
from pyggml.ops import flash_attn_ext
from pyggml.runtime import Devices, bind, schedule

SHAPES = [(41, 4, 2, 6)]  # keys, heads, heads of keys, numbers of a head
if not SIMULATED:  # which takes minutes
    SHAPES += [
        (300, 6, 2, 36),
        (700, 8, 2, 128),
        (97, 4, 4, 256),
        (700, 3, 1, 64),
        (90, 4, 2, 80),
        (90, 2, 1, 10),
    ]


# The simulator has no clusters, nor have cards before Hopper. All join many keys by tickets.
WAYS = ["by tickets", "in clusters"] if has_clusters() else ["by tickets"]


@pytest.fixture(params=WAYS)
def joined(request, monkeypatch):
    """How blocks join their parts."""
    if request.param == "by tickets":
        monkeypatch.setattr(decode, "_MOST_OF_CLUSTERS", 0)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("n_keys", "n_heads", "n_key_heads", "size"), SHAPES)
def test_the_parts_of_the_keys_are_joined(
    card, joined, has_sinks, n_keys, n_heads, n_key_heads, size
):
    rng = np.random.default_rng(2)

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    q = leaf(numbers(2, n_heads, size))
    k, v = (leaf(numbers(n_keys, n_key_heads, size).astype(np.float16)) for _ in "kv")
    span = leaf(np.array([[0, n_keys - 4], [3, 5]], np.int32))
    sinks = leaf(numbers(n_heads)) if has_sinks else None
    graph = Graph.of(flash_attn_ext(q, k, v, span, 0.7 / size**0.5, sinks=sinks))
    found = bind(schedule(graph, Devices([card, CPU()])))
    wanted = bind(schedule(graph, Devices([CPU()])))
    for _ in range(2):
        found(), wanted()
        (o,) = graph.outputs
        np.testing.assert_allclose(found.read(o), wanted.read(o), rtol=1e-5, atol=1e-6)
        write(q, numbers(2, n_heads, size))


def test_what_is_no_number_stays_none(card, joined):
    """As on the CPU, so that logits which are no numbers are seen."""
    q, k, v = (leaf(np.ones((n, 2, 6), np.float32)) for n in (1, 41, 41))
    write(q, np.full((1, 2, 6), np.nan))
    span = leaf(np.array([[0, 37]], np.int32))
    graph = Graph.of(flash_attn_ext(q, k, v, span, 0.7))
    program = bind(schedule(graph, Devices([card, CPU()])))
    program()
    assert np.isnan(program.read(graph.outputs[0])).all()
