"""Activations that several products read are packed once, and no bit of a result changes."""

import numpy as np
import pytest
from arenas import bound

from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import dtype
from pyggml.graph.op import SHARED
from pyggml.graph.tensor import leaf
from pyggml.kernels.gemm.few import FEW
from pyggml.ops import add, add_inplace, mul_mat, mul_mat_add, reshape, scale
from pyggml.quants import quantize

N_IN = 64


def packed(rng, n_out, kind="Q8_0"):
    raw = quantize(rng.standard_normal((n_out, N_IN)), kind)
    return leaf(raw.view(dtype(kind).numpy), f"{kind} weight", dtype(kind))


def tokens(rng, *shape):
    return leaf(rng.standard_normal((*shape, N_IN)).astype(np.float32))


def results(p):
    arena = p.backend.alloc(p.n_bytes)
    arena[:] = 255  # NaN
    bound(p, arena)()
    return [np.array(array(t)) for t in p.graph.outputs]


def groups(p):
    """The nodes of each scratch."""
    found = {}
    for node, scratch in p.shared.items():
        found.setdefault(scratch, []).append(node)
    return list(found.values())


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
def test_products_of_one_source_share_its_packing(compute, rng):
    x = scale(tokens(rng, 9), 0.5)
    one, other = mul_mat(packed(rng, 20), x), mul_mat(packed(rng, 70, "Q4_0"), x)
    sum_ = mul_mat_add(one, packed(rng, 20, "Q5_1"), x)
    alone = mul_mat(packed(rng, 20), scale(x, 2.0))
    p = plan(Graph.of(add(sum_, alone), other, steps=[one, other]), CPU(compute))
    assert groups(p) == [[t for t in p.graph.nodes if t in (one, other, sum_)]]
    scratch = p.shared[one]
    assert scratch.op is SHARED and scratch.src == (one,)
    after = p.graph.nodes.index(sum_) + CPU.beside  # which may run beside it
    assert (p.lives[scratch].first, p.lives[scratch].last) == (
        p.graph.nodes.index(one),
        min(after, len(p.graph.nodes) - 1),
    )
    separate = plan(p.graph, p.backend, share=False)
    assert not separate.shared
    for a, b in zip(results(p), results(separate), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
def test_weights_share_the_packing_of_a_path(compute, rng):
    """In integers some want bytes of x where others want floats; in floats all want the same."""
    x = scale(tokens(rng, 9), 0.5)
    nodes = [mul_mat(packed(rng, 20, kind), x) for kind in ("Q8_0", "F16", "Q4_0", "BF16")]
    p = plan(Graph.of(*nodes), CPU(compute))
    assert groups(p) == ([nodes[::2], nodes[1::2]] if compute == "int8" else [nodes])
    separate = plan(p.graph, p.backend, share=False)
    for a, b in zip(results(p), results(separate), strict=True):
        np.testing.assert_array_equal(a, b)


def test_views_of_the_same_numbers_count_as_one_source(rng):
    x = scale(tokens(rng, 4, 6), 0.5)
    nodes = [mul_mat(packed(rng, 20), reshape(x, (24, N_IN))) for _ in range(2)]
    assert groups(plan(Graph.of(*nodes), CPU())) == [nodes]
    nodes.append(mul_mat(packed(rng, 20), x))  # the same bytes, but read in another shape
    assert groups(plan(Graph.of(*nodes), CPU())) == [nodes[:2]]


def test_what_is_changed_in_place_is_packed_anew(rng):
    x = tokens(rng, 9)
    before = mul_mat(packed(rng, 20), x)
    after = mul_mat(packed(rng, 20), add_inplace(x, tokens(rng, 9)))
    p = plan(Graph.of(before, after), CPU())
    assert not p.shared
    found = results(p)
    assert np.isfinite(found).all() and not np.allclose(*found)


@pytest.mark.parametrize("n_tokens, kind", [(FEW, "Q8_0"), (9, "F32")])
def test_what_is_not_packed_is_not_shared(n_tokens, kind, rng):
    x = tokens(rng, n_tokens)
    assert not plan(Graph.of(*(mul_mat(packed(rng, 20, kind), x) for _ in range(2))), CPU()).shared
