"""The passes over a finished graph: new nodes where sources change, nothing else touched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.alloc.usage import bytes_at
from pyggml.backward import (
    Keep,
    build_backward,
    rematerialise,
    round_gradients,
    round_large,
    training_graph,
)
from pyggml.backward.recompute import made_again
from pyggml.graph import Graph, Notes, reachable
from pyggml.graph.dtypes import BF16, F32, I32
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import leaf, zeros
from pyggml.ops import (
    add,
    cpy,
    flash_attn_ext,
    mul,
    mul_mat,
    narrow,
    reshape,
    rms_norm_mul,
    scale,
    silu,
    sqr,
    sum_,
    transpose,
)
from pyggml.quants import dequantize, quantize
from pyggml.runtime import results, schedule

N = 8
STEPS = [
    lambda x, w: add(x, w),
    lambda x, w: mul(x, w),
    lambda x, w: silu(x),
    lambda x, w: scale(x, 0.5),
    lambda x, w: mul_mat(w, x),
    lambda x, w: mul_mat(cpy(w, BF16), x),
    lambda x, w: transpose(x),
    lambda x, w: rms_norm_mul(x, reshape(narrow(w, 0, 1, 1), (N,))),
    lambda x, w: reshape(reshape(x, (2, N * N // 2)), (N, N)),
]


@st.composite
def differentiated(draw):
    """build_backward's graph of up to 15 steps, each on one of the last results and on a weight,
    with notes on any of its tensors."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    weights = [leaf(rng.uniform(-1, 1, (N, N)).astype(np.float32), f"w{i}") for i in range(3)]
    pool = [scale(weights[0], 0.5)]
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=15)):
        x, w = (draw(st.sampled_from(some)) for some in (pool[-3:], [*weights, *pool[-2:]]))
        pool.append(step(x, w).named(f"step {len(pool)}"))
    some = st.frozensets(st.sampled_from(pool), max_size=4)
    notes = Notes(boundaries=draw(some), large=draw(some))
    forward = Graph.of(sum_(sqr(pool[-1]))).with_notes(notes)
    return build_backward(forward, [w for w in weights if w in forward.leaves])


def anatomy(graph):
    """All that a pass could change of the tensors of a graph."""
    return [
        (t, t.op, t.src, t.saved, t.base, t.offset, t.strides, t.name, t.data, dict(t.params))
        for t in (*graph.leaves, *graph.nodes)
    ]


def assert_in_order(graph):
    number = {t: i for i, t in enumerate(graph.nodes)}
    assert len(number) == len(graph.nodes)
    assert all(number[s] < number[t] for t in graph.nodes for s in t.src if s.op is not None)
    assert set(graph.nodes) | set(graph.leaves) == set(reachable(*graph.outputs))


@given(differentiated(), st.sampled_from([F32, BF16]), st.sampled_from(Keep))
@settings(max_examples=80)
def test_a_pass_changes_no_tensor_and_leaves_an_order_that_can_run(graph, kept_as, keep):
    before = anatomy(graph)
    rounded = round_gradients(round_large(graph, kept_as), kept_as)
    between = anatomy(rounded)
    kept = rematerialise(rounded, keep)
    for found in (graph, rounded, kept):
        assert_in_order(found)
        assert found["loss"] is graph["loss"]
        now, then = found.notes, graph.notes
        assert (now.boundaries, now.large) == (then.boundaries, then.large)
        for pairs, earlier in ((now.backward, then.backward), (now.sums, then.sums)):
            assert [*pairs.values()] == [*earlier.values()] and {*pairs} <= {*found.nodes}
    for now, then in ((anatomy(graph), before), (anatomy(rounded), between)):
        assert all(a is b for one, other in zip(now, then, strict=True)
                   for a, b in zip(one[:-1], other[:-1], strict=True))  # fmt: skip
        assert [row[-1] for row in now] == [row[-1] for row in then]


@given(differentiated(), st.sampled_from([F32, BF16]))
@settings(max_examples=60)
def test_no_bit_depends_on_what_is_kept(graph, kept_as):
    rounded = round_gradients(round_large(graph, kept_as), kept_as)
    wanted = results(rounded)
    np.testing.assert_array_equal(wanted[0], results(graph)[0])
    for keep in Keep:
        for a, b in zip(results(rematerialise(rounded, keep)), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@given(differentiated(), st.sampled_from(Keep))
@settings(max_examples=60)
def test_forward_nodes_stay_and_what_is_made_twice_is_read_in_the_second_make_only(graph, keep):
    end = graph.nodes.index(graph["loss"]) + 1
    kept = rematerialise(graph, keep)
    assert kept.nodes[:end] == graph.nodes[:end]
    backward = [t for t in kept.nodes[end:] if t.op is not SAVED]
    n_twice = len(kept.nodes) - len(graph.nodes)
    read = {s for t in backward for s in t.src}
    made = {t.name for t in graph.nodes[:end] if t.name}
    twice = [t for t in backward if t.name in made]
    assert len(twice) <= n_twice
    assert all(t in read for t in twice), "nothing is made again that nothing reads"
    once = {t.name: t for t in graph.nodes[:end]}
    assert not {once[t.name] for t in twice} & read, "nobody reads what is made again"
    if keep is Keep.ALL:
        assert kept is graph


# -- single facts ----------------------------------------------------------------------------------


def test_the_gradient_of_a_matrix_in_bfloat16_reads_its_factor_so():
    """Both are rounded, while the gradient is that of the float32 matrix, and sums are float32."""
    rng = np.random.default_rng(0)
    w, v, x = (rng.standard_normal(s).astype(np.float32) for s in ((33, 70), (5, 33), (40, 70)))
    leaves = leaf(w, "w"), leaf(v, "v")
    h = mul_mat(cpy(leaves[0], BF16), leaf(x)).named("h")
    loss = sum_(sqr(mul_mat(cpy(leaves[1], BF16), h)))
    forward = Graph.of(loss).with_notes(Notes(large=frozenset([h])))
    graph = training_graph(forward, leaves, kept_as=BF16)
    w, v, near = (as_bfloat16(a).astype(np.float64) for a in (w, v, x))
    hidden = x @ w.T
    slope = 2 * hidden @ v.T
    dw, dv = (slope @ v).T @ near, slope.T @ as_bfloat16(hidden.astype(np.float32))
    _, *found = results(graph)
    for ours, wanted in zip(found, (dw, dv), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def as_bfloat16(x):
    return dequantize(quantize(x, "BF16"), "BF16").reshape(x.shape)


def chain():
    """Two layers of a norm, a product and a unit; their tensors by name."""
    w, gain = (zeros(s, name=n) for s, n in (((N, N), "w"), ((N,), "gain")))
    x = start = scale(w, 0.5).named("start")
    for i in range(2):
        h = mul_mat(w, rms_norm_mul(x, gain).named(f"norm {i}")).named(f"product {i}")
        x = mul_mat(w, silu(h).named(f"unit {i}")).named(f"out {i}")
    loss = sum_(sqr(x)).named("loss")
    named = {t.name: t for t in Graph.of(loss).nodes}
    notes = Notes(
        frozenset([start, named["out 0"], named["out 1"]]),
        frozenset([named["product 0"], named["product 1"]]),
    )
    return build_backward(Graph.of(loss).with_notes(notes), [w, gain]), named


def deep(n_layers):
    """Residual layers behind each other, and the results that are handed on."""
    rng = np.random.default_rng(0)
    w = leaf(rng.uniform(-0.1, 0.1, (N, N)).astype(np.float32), "w")
    gain = leaf(np.ones(N, np.float32), "gain")
    x = scale(leaf(rng.uniform(-1, 1, (512, N)).astype(np.float32), "x"), 0.5)
    boundaries = [x]
    for _ in range(n_layers):
        h = mul_mat(w, silu(mul_mat(w, rms_norm_mul(x, gain))))
        x = add(x, mul_mat(w, silu(h)))
        boundaries.append(x)
    forward = Graph.of(sum_(sqr(x)).named("loss")).with_notes(Notes(frozenset(boundaries)))
    return build_backward(forward, [w, gain]), boundaries


def test_of_many_layers_three_in_four_boundaries_are_kept(monkeypatch):
    """As many layers are computed again at once as fit where the later boundaries were."""
    graph, boundaries = deep(40)
    again = made_again(graph, Keep.LAYERS)
    dropped = [i for i, t in enumerate(boundaries) if t in again]
    assert 5 <= len(dropped) <= 10
    assert min(dropped) > 0 and max(dropped) < 39, "the last ones are read at once"
    kept, wanted = rematerialise(graph, Keep.LAYERS), results(graph)
    monkeypatch.setattr(
        "pyggml.backward.recompute._boundaries_made_again", lambda graph, n_bytes: set()
    )
    whole = rematerialise(graph, Keep.LAYERS)
    for found in (kept, whole):
        for a, b in zip(results(found), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    plans = [plan for found in (kept, whole) for plan in schedule(found).plans.values()]
    assert max(bytes_at(plans[0])) < 0.9 * max(bytes_at(plans[1]))


def backward_names(graph):
    end = graph.nodes.index(graph["loss"]) + 1
    return [t.name for t in graph.nodes[end:] if t.name and "d(" not in t.name]


def test_cheap_nodes_are_made_again_right_earlierthey_are_read():
    graph, _ = chain()
    kept = rematerialise(graph, Keep.COSTLY)
    assert backward_names(kept) == ["unit 1", "norm 1", "unit 0", "norm 0"]
    nodes = kept.nodes
    for i, t in enumerate(nodes[nodes.index(graph["loss"]) :], nodes.index(graph["loss"])):
        if t.name in ("unit 1", "norm 1", "unit 0", "norm 0"):
            assert t in nodes[i + 1].src


def test_a_layer_is_made_again_from_its_boundary():
    graph, named = chain()
    kept = rematerialise(graph, Keep.LAYERS)
    layer = ["norm {}", "product {}", "unit {}"]
    assert backward_names(kept) == [n.format(i) for i in (1, 0) for n in layer]
    again = next(t for t in reversed(kept.nodes) if t.name == "norm 1")
    assert again.src[0] is named["out 0"]


def test_a_rounded_copy_follows_its_tensor_and_is_all_that_the_backward_pass_reads():
    graph, named = chain()
    rounded = round_large(graph, BF16)
    end = rounded.nodes.index(named["loss"])
    for i in range(2):
        product = named[f"product {i}"]
        copy = rounded.nodes[rounded.nodes.index(product) + 1]
        assert copy.dtype is BF16 and copy.src == (product,)
        readers = [t for t in rounded.nodes[end:] if copy in t.src]
        assert [(t.dtype, t.name) for t in readers] == [(F32, product.name)]
        assert not [t for t in rounded.nodes[end:] if product in t.src]
    assert backward_names(rounded) == ["product 1", "unit 1", "product 0", "unit 0"]
    assert round_large(graph, F32) is graph


@pytest.mark.parametrize("keep", [Keep.COSTLY, Keep.LAYERS])
def test_a_layer_made_again_holds_its_copies_and_not_what_they_were_rounded_from(keep):
    """Each copy stands right behind its tensor, though the first product's is read last."""
    w = zeros((N, N), name="w")
    start = scale(w, 0.5)
    first = mul_mat(w, start)
    second = mul_mat(w, first)
    out = mul_mat(w, second)
    notes = Notes(frozenset([start, out]), frozenset([first, second]))
    graph = build_backward(Graph.of(sum_(sqr(out))).with_notes(notes), [w])
    kept = rematerialise(round_large(graph, BF16), keep)
    nodes, end = kept.nodes, kept.nodes.index(graph["loss"])
    copies = [i for i, t in enumerate(nodes) if t.dtype is BF16]
    assert len(copies) == 2
    assert all(nodes[i].src == (nodes[i - 1],) for i in copies)
    assert all((i > end) is (keep is Keep.LAYERS) for i in copies)


def test_what_a_kernel_saves_is_saved_anew_by_the_second_make():
    q = scale(zeros((16, 2, 8), name="q"), 1.0).named("start")
    o = flash_attn_ext(q, q, q, zeros((16, 2), I32), 1.0).named("attention")
    out = scale(o, 2.0).named("out")
    notes = Notes(frozenset([q, out]))
    graph = build_backward(Graph.of(sum_(sqr(out))).with_notes(notes), [q])
    nodes = rematerialise(graph, Keep.LAYERS).nodes
    again = next(t for t in nodes if t.name == "attention" and t is not o)
    back = next(t for t in nodes if t.op.name == "flash_attn_back")
    assert set(again.saved) < set(back.src) and again in back.src
    assert not {o, *o.saved} & set(back.src)
    assert o.saved[0] not in nodes


def test_attention_may_round_in_training():
    """Made again or not: both are the same op on the same numbers. The loss alone may not."""
    q = scale(zeros((16, 2, 8), name="q"), 1.0).named("start")
    o = flash_attn_ext(q, q, q, zeros((16, 2), I32), 1.0).named("attention")
    out = scale(o, 2.0).named("out")
    alone = Graph.of(sum_(sqr(out))).with_notes(Notes(frozenset([q, out])))
    nodes = training_graph(alone, [q], keep=Keep.LAYERS).nodes
    made = [t for t in nodes if t.op.name == "flash_attn_ext"]
    assert [t.params["may_round"] for t in made] == [True, True]
    assert o in alone.nodes and not o.params["may_round"]
