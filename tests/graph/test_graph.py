"""A graph holds what its outputs need, each node after its sources, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

from pyggml.errors import GraphError
from pyggml.graph import Graph, last_write, topological
from pyggml.graph.tensor import leaf, zeros
from pyggml.ops import (
    OPS,
    add,
    add_inplace,
    after,
    dup,
    fill_inplace,
    mul,
    narrow,
    reshape,
    scale,
    set_rows,
    silu,
    sqr,
)
from pyggml.runtime import results

pytestmark = pytest.mark.quick


def test_sources_stand_before_users():
    x = zeros((4,), name="x")
    a = scale(x, 2.0)
    b = add(a, x)
    c = add(a, b)
    assert topological(c) == [x, a, b, c]


def test_each_source_stands_right_before_its_first_reader():
    x = zeros((4,))
    a, b = scale(x, 2.0), scale(x, 3.0)
    of_a, of_b = scale(a, 2.0), scale(b, 2.0)
    c = add(of_b, of_a)
    assert topological(c) == [x, b, of_b, a, of_a, c]
    assert topological(a, c) == [x, a, b, of_b, of_a, c]


def test_steps_are_made_one_after_the_other_if_anything_needs_them():
    x = zeros((4,))
    a, b, idle = scale(x, 2.0), scale(x, 3.0), scale(x, 4.0)
    c = add(scale(b, 2.0), a)
    assert Graph.of(c).nodes == (b, c.src[0], a, c)
    assert Graph.of(c, steps=[idle, a, b]).nodes == (a, b, c.src[0], c)


def test_who_reads_a_tensor_runs_before_it_is_written_over():
    a, b = scale(zeros((2, 4)), 2.0), zeros((2, 4))
    written = add_inplace(a, b)
    old = scale(reshape(a, (8,)), 3.0)
    new = scale(reshape(written, (8,)), 3.0)
    for loss in (add(old, new), add(new, old)):
        order = topological(loss)
        assert order.index(old) < order.index(written) < order.index(new)


def test_several_writes_into_one_tensor_stand_in_the_order_of_their_sources():
    table, rows = zeros((4, 2)), zeros((1, 2))
    ids = [leaf(np.array([i], np.int32)) for i in (1, 2)]
    first, second = (set_rows(table, rows, i) for i in ids)
    order = topological(add(second, first))
    assert order.index(second) < order.index(first)


def test_numbers_that_are_needed_after_they_were_written_over_are_refused():
    a = scale(zeros((4,)), 2.0)
    written = add_inplace(a, zeros((4,)))
    for late in (mul(a, written), mul(written, a)):
        with pytest.raises(GraphError, match="needed by what must run before"):
            Graph.of(late)


def test_what_no_output_needs_is_left_out():
    x, other = zeros((4,)), zeros((4,))
    a = scale(x, 2.0)
    scale(a, 3.0)
    add(a, other)
    graph = Graph.of(a)
    assert graph.nodes == (a,)
    assert graph.leaves == (x,)
    assert graph.outputs == (a,)


def test_a_tensor_appears_once_however_often_it_is_used():
    a = scale(zeros((4,)), 2.0)
    graph = Graph.of(add(a, a), add(a, scale(a, 3.0)), a)
    assert len(graph.nodes) == len(set(graph.nodes)) == 4


def test_an_output_may_be_a_leaf():
    x = zeros((4,))
    graph = Graph.of(x)
    assert graph.nodes == ()
    assert graph.outputs == (x,)


def test_a_long_chain_needs_no_deep_stack():
    t = zeros((1,))
    for _ in range(20_000):
        t = narrow(t, 0, 0, 1)
    assert len(Graph.of(t).nodes) == 20_000


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=30), st.data())
def test_order_on_random_graphs(pairs, data):
    pool = [zeros((2,))]
    for i, j in pairs:
        pool.append(add(pool[i % len(pool)], pool[j % len(pool)]))
    outputs = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True))
    order = topological(*outputs)
    place = {t: i for i, t in enumerate(order)}
    assert len(place) == len(order)
    assert set(outputs) <= place.keys()
    assert all(place[s] < place[t] for t in order for s in t.src)
    needed = set(outputs)
    for t in reversed(pool):
        if t in needed:
            needed.update(t.src)
    assert needed == place.keys()


def test_the_listing_has_one_line_a_node():
    x = zeros((2, 3), name="x")
    a = scale(x, 2.0).named("twice")
    listing = str(Graph.of(add(a, x))).splitlines()
    assert len(listing) == 2
    assert listing[0].split() == ["0", "scale", "F32[2,", "3]", "(x)", "twice"]
    assert "(0, x)" in listing[1]


def test_a_graph_s_repr_is_one_line():
    x = leaf(np.ones(3, np.float32), "x")
    y, z = scale(x, 2.0).named("y"), scale(x, 3.0)
    assert repr(Graph.of(y)) == "<Graph of y: nodes 1, leaves 1>"
    assert repr(Graph.of(y, z)) == "<Graph of y and 1 more: nodes 2, leaves 1>"


def test_a_graph_and_a_tensor_print_as_one_line_where_fields_would_be_printed():
    """Hypothesis warns of a failing example above 30 kB, and a warning is an error here."""
    y = scale(leaf(np.ones((100, 100), np.float32), "x"), 2.0).named("y")
    assert pretty(y) == repr(y) == "<y F32[100, 100] = scale>"
    assert pretty(Graph.of(y)) == repr(Graph.of(y)) == "<Graph of y: nodes 1, leaves 1>"


def test_an_output_has_a_name():
    x = zeros((4,), name="x")
    a, b, c = silu(x), sqr(x), scale(x, 2.0)
    graph = Graph.of(a, loss=b, **{"grad:w": c})
    assert graph.outputs == (a, b, c)
    assert graph["loss"] is b and graph["grad:w"] is c
    assert graph.outputs_of("grad") == {"w": c}
    with pytest.raises(GraphError, match="'logits'; the names are: loss, grad:w"):
        graph["logits"]
    with pytest.raises(GraphError, match="the names are: none"):
        Graph.of(a)[""]


# -- what is written over ------------------------------------------------------------------------


def test_two_writes_over_one_tensor_are_refused():
    """The second would add to what the first left; windows that do not meet are let through."""
    for both in (add_inplace, lambda t, b: fill_inplace(t, 1.0)):
        t = scale(zeros((4, 4)), 1.0)
        first, second = both(t, zeros((4, 4))), both(t, zeros((4, 4)))
        with pytest.raises(GraphError, match="has written over them|is written over by"):
            Graph.of(scale(first, 1.0), scale(second, 1.0))
        with pytest.raises(GraphError, match="has written over them|is written over by"):
            Graph.of(first, second)
    t = scale(zeros((4, 4)), 1.0)
    halves = [narrow(t, 0, i, 2) for i in (0, 2)]
    assert len(Graph.of(*(add_inplace(h, zeros((2, 4))) for h in halves)).nodes) == 5
    meeting = [narrow(t, 0, i, 2) for i in (0, 1)]
    with pytest.raises(GraphError, match="has written over them|is written over by"):
        Graph.of(*(add_inplace(h, zeros((2, 4))) for h in meeting))


@pytest.mark.parametrize("made", [lambda: scale(zeros((3,)), 1.0), lambda: zeros((3,))])
def test_an_output_that_is_written_over_is_refused(made):
    t = made()
    written = add_inplace(t, zeros((3,)))
    for outputs in ((t, written), (written, t), (reshape(t, (3, 1)), written)):
        with pytest.raises(GraphError, match="the output .* is written over by"):
            Graph.of(*outputs)
    assert Graph.of(dup(t), written).outputs[1] is written


def test_rows_may_be_set_side_by_side():
    table, rows = scale(zeros((4, 2)), 1.0), zeros((1, 2))
    ids = [leaf(np.array([i], np.int32)) for i in (1, 2)]
    first, second = (set_rows(table, rows, i) for i in ids)
    assert len(Graph.of(scale(first, 1.0), scale(second, 1.0), first).nodes) == 5
    with pytest.raises(GraphError, match="has written over them"):
        Graph.of(first, scale(add_inplace(table, zeros((4, 2))), 1.0))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_a_graph_has_its_own_numbers_or_an_error(steps):
    """Random graphs of writes, windows and sums, against arrays that nothing writes over."""
    first = np.arange(8, dtype=np.float32)
    pool = [(scale(leaf(first.copy()), 1.0), first)]
    for kind, i, j in steps:
        (a, x), (b, y) = pool[i % len(pool)], pool[j % len(pool)]
        fitting = y if x.shape == y.shape else y[:1]
        other = b if x.shape == y.shape else narrow(b, 0, 0, 1)
        start, stop = (0, len(x) // 2 or 1) if kind == 2 else (len(x) // 2, len(x))
        if kind < 2:
            pool.append(((add, add_inplace)[kind](a, other), x + fitting))
        else:
            pool.append((narrow(a, 0, start, stop - start), x[start:stop]))
    try:
        graph = Graph.of(*(t for t, _ in pool[-3:]))
    except GraphError:
        return
    for found, (_, wanted) in zip(results(graph), pool[-3:], strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_view_after_a_writer_shows_what_that_wrote():
    x, y = zeros((4,), name="x"), zeros((4,), name="y")
    writer = replace(OPS["silu"], changes=(0,))(x).named("writer")
    new = reshape(after(x, writer), (2, 2))
    assert last_write(new) is writer and last_write(after(x, silu(y))) is x
    assert writer in Graph.of(new, writer).nodes
    with pytest.raises(GraphError, match="the output <reshape .* is written over by <writer"):
        Graph.of(reshape(x, (2, 2)), writer)
