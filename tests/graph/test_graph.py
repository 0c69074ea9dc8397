"""A graph holds what its outputs need, each node after its sources, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from pyggml.graph import Graph, topological
from pyggml.ops import add, narrow, scale
from pyggml.tensor import zeros


def test_sources_stand_before_users():
    x = zeros((4,), name="x")
    a = scale(x, 2.0)
    b = add(a, x)
    c = add(a, b)
    assert topological(c) == [x, a, b, c]


def test_nodes_stand_in_the_order_in_which_they_were_made():
    x = zeros((4,))
    a, b = scale(x, 2.0), scale(x, 3.0)
    assert topological(add(a, b))[:3] == [x, a, b]
    c = add(b, a)
    assert topological(c) == [x, a, b, c]
    assert topological(b, a) == [x, a, b]


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
