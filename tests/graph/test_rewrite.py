"""`rewrite`: what it keeps, what it leaves out, and where new nodes stand; and `Graph.readers`."""

import numpy as np
import pytest
from graphs import graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.errors import GraphError
from pyggml.graph import Graph, Notes, reachable, zeros
from pyggml.graph.op import SAVED
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import leaf
from pyggml.ops import add, add_inplace, flash_attn_ext, mul, scale, silu, sqr, sum_, transpose
from pyggml.runtime import results

pytestmark = pytest.mark.quick


def anew(draw, graph):
    """{some node: the same one once more}."""
    nodes = [t for t in graph.nodes if t.op is not SAVED]
    some = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=5, unique=True))
    return {t: t.reading(t.src) for t in some}


@st.composite
def replaced(draw):
    """A graph, and some of its nodes made anew."""
    graph = draw(graphs().filter(lambda graph: graph.nodes))
    return graph, anew(draw, graph)


@st.composite
def written(draw):
    """A graph that reads a leaf's numbers and writes over them in turns, and some nodes anew."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    memory, x = (leaf(rng.uniform(-1, 1, 8).astype(np.float32), n) for n in ("memory", "x"))
    read = []
    for i, writes in enumerate(draw(st.lists(st.booleans(), min_size=1, max_size=9))):
        if writes:
            memory = add_inplace(memory, read[-1] if read else x).named(f"write {i}")
        else:
            read.append(mul(memory, x).named(f"read {i}"))
    graph = Graph.of(memory, *read[::-1]) if memory.op else Graph.of(*read)
    return graph, anew(draw, graph)


def listing(graph):
    """The nodes that run, as they are written down: op, type, name, and what they read of which
    nodes. A saved result may stand anywhere behind the node that writes it."""
    nodes = [t for t in graph.nodes if t.op is not SAVED]
    number = {t: (i, None) for i, t in enumerate((*graph.leaves, *nodes))}
    number |= {s: (*number[t], i) for t in nodes for i, s in enumerate(t.saved)}
    return [(t.op, t.shape, t.dtype, t.name, [number[s] for s in t.src]) for t in nodes]


@given(replaced())
@settings(max_examples=60)
def test_nodes_made_anew_change_no_number_no_order_and_no_source(drawn):
    graph, replacements = drawn
    new = rewrite(graph, replacements)
    assert listing(new) == listing(graph)
    assert not set(replacements).intersection(new.nodes)
    for t in new.nodes:
        if t.op is SAVED:
            assert t in t.src[0].saved, "a saved result belongs to the node that writes it"
    for a, b in zip(results(new), results(graph), strict=True):
        np.testing.assert_array_equal(a, b)


@given(replaced())
@settings(max_examples=60)
def test_only_what_depends_on_a_new_node_is_built_anew(drawn):
    graph, replacements = drawn
    new = rewrite(graph, replacements)
    runs = ([t for t in g.nodes if t.op is not SAVED] for g in (graph, new))
    for old, now in zip(*runs, strict=True):
        depends = not set(replacements).isdisjoint(reachable(old))
        assert (now is not old) == depends


@given(written())
@settings(max_examples=60)
def test_reads_and_writes_of_the_same_memory_keep_their_order(drawn):
    graph, replacements = drawn
    new = rewrite(graph, replacements)
    assert listing(new) == listing(graph)
    memory = [t.root.data.copy() for t in graph.nodes if t.is_write][:1]
    wanted = results(graph)
    for t in (t for t in graph.nodes if t.is_write):
        t.root.data[:] = memory[0]
    for a, b in zip(results(new), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@given(replaced(), st.data())
@settings(max_examples=60)
def test_what_no_output_needs_is_left_out(drawn, data):
    graph, _ = drawn
    old = data.draw(st.sampled_from([t for t in graph.nodes if t.op is not SAVED]))
    new = rewrite(graph, {old: zeros(old.shape, name="instead"), **dict.fromkeys(old.saved, old)})
    assert set(new.nodes) | set(new.leaves) == set(reachable(*new.outputs))
    assert old not in new.nodes


@given(graphs())
@settings(max_examples=60)
def test_readers_are_the_nodes_that_have_a_tensor_among_their_sources(graph):
    for t in (*graph.leaves, *graph.nodes, *(s for node in graph.nodes for s in node.saved)):
        wanted = [node for node in graph.nodes if node.op is not SAVED and t in node.src]
        assert list(graph.readers[t]) == wanted


# -- single facts ----------------------------------------------------------------------------------


def chain(*names):
    """x, and a node of each name, which reads the one before."""
    made = [zeros((4,), name="x")]
    for name in names:
        made.append(silu(made[-1]).named(name))
    return made


def names(graph):
    return [t.name for t in graph.nodes]


def test_without_replacements_it_is_the_graph_itself():
    graph = Graph.of(chain("a")[-1])
    assert rewrite(graph, {}) is graph


def test_a_new_node_gets_the_name_and_the_notes_of_what_it_replaces():
    x, a, b = chain("a", "b")
    new = rewrite(Graph.of(b).with_notes(Notes(frozenset([a]), frozenset([b]))), {a: sqr(x)})
    first, second = new.nodes
    assert (first.name, first.op.name, second.src) == ("a", "sqr", (first,))
    assert new.notes == Notes(frozenset([first]), frozenset([second]))
    assert new.outputs == (second,)


def test_a_node_of_the_graph_keeps_its_name_where_it_replaces_another():
    x = zeros((4,), name="x")
    a, unnamed = silu(x).named("a"), sqr(x)
    assert names(rewrite(Graph.of(add(a, unnamed)), {a: unnamed})) == ["", ""]


def test_a_new_node_may_be_made_of_tensors_that_are_replaced_too():
    x, a, b, c = chain("a", "b", "c")
    new = rewrite(Graph.of(c), {a: sqr(x), b: scale(a, 2.0)})
    assert [t.op.name for t in new.nodes] == ["sqr", "scale", "silu"]
    assert new.nodes[1].src == new.nodes[:1]


def test_what_needs_a_new_node_waits_for_its_sources():
    x = zeros((4,), name="x")
    early, late = silu(x).named("early"), sqr(x).named("late")
    reader, other = scale(early, 2.0).named("reader"), scale(x, 3.0).named("other")
    steps = (early, reader, other, late)
    graph = Graph.of(add(add(reader, other).named("end"), late).named("sum"), steps=steps)
    assert names(graph) == ["early", "reader", "other", "late", "end", "sum"]
    new = rewrite(graph, {early: mul(late, x)})
    assert names(new) == ["other", "late", "early", "reader", "end", "sum"]


def test_several_nodes_become_one_with_what_it_saves():
    q, k, v = (zeros((4, 2, 8), name=n) for n in "qkv")
    span = leaf(np.array([[0, i + 1] for i in range(4)], np.int32), "span")
    attention = flash_attn_ext(q, k, v, span, 0.3)
    (saved, *_) = attention.saved
    first, second = silu(q).named("first"), zeros(saved.shape)
    second = silu(second).named("second")
    graph = Graph.of(transpose(second), sum_(first))
    new = rewrite(graph, {first: attention, second: saved})
    assert [t.op.name for t in new.nodes] == ["flash_attn_ext", "saved", "transpose", "sum"]
    assert new.nodes[0].name == "first" and new.nodes[1] in new.nodes[0].saved


def test_steps_put_nodes_in_another_order():
    x = zeros((4,), name="x")
    a, b = silu(x).named("a"), sqr(x).named("b")
    graph = Graph.of(add(a, b).named("c"))
    assert names(rewrite(graph, {}, [b, a, graph.nodes[-1]])) == ["b", "a", "c"]


def test_what_is_no_step_stands_before_its_first_reader():
    x, _, b, c = chain("a", "b", "c")
    new = rewrite(Graph.of(c), {c: add(b, sqr(x).named("new"))})
    assert names(new) == ["a", "b", "new", "c"]


def test_a_replacement_that_needs_what_it_replaces_is_refused():
    _, a, b = chain("a", "b")
    with pytest.raises(GraphError, match="is needed by what replaces it"):
        rewrite(Graph.of(b), {a: scale(b, 2.0)})


def test_a_saved_result_without_a_successor_is_refused():
    q, k, v = (zeros((4, 2, 8), name=n) for n in "qkv")
    span = leaf(np.array([[0, i + 1] for i in range(4)], np.int32), "span")
    attention = flash_attn_ext(q, k, v, span, 0.3)
    with pytest.raises(GraphError, match="saves no such"):
        rewrite(Graph.of(attention, attention.saved[0]), {attention: silu(attention.src[0])})


def test_a_write_over_numbers_that_are_read_later_is_refused():
    memory, x = zeros((4,), name="memory"), zeros((4,), name="x")
    old = silu(memory).named("old")
    written = add_inplace(memory, x)
    with pytest.raises(GraphError, match="written over"):
        rewrite(Graph.of(written, old), {old: add(memory, written)})
