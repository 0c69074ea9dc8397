"""Patterns of nodes, and rewrites by a table of them."""

import pytest
from card_patterns import ops_named

from pyggml.backends.cpu.rewrites import TABLE
from pyggml.graph import Graph
from pyggml.graph.op import OPS
from pyggml.graph.pattern import Pattern
from pyggml.graph.table import Rewrite, by_table
from pyggml.graph.tensor import zeros
from pyggml.ops import add, cpy, mul, mul_mat_add, reshape, scale, silu, sqr
from pyggml.ops import mul_mat as dot

W, X, Y = zeros((8, 4)), zeros((3, 4)), zeros((3, 8))


def matches(text, *outputs, **settings):
    return [*Pattern(text, **settings).matches(Graph.of(*outputs))]


def test_names_stand_for_one_tensor_each():
    twice, once = mul(silu(X), X), mul(silu(X), X)
    (m,) = matches("y = silu(x); z = mul(y, x)", twice, mul(silu(X), sqr(X)))
    assert (m.x, m.y, m.z) == (X, twice.src[0], twice) and m.nodes == [m.y, m.z]
    found = matches("y = silu(x); z = mul(y, x)", twice, once)
    assert [m.z for m in found] == [twice, once]
    assert not matches("y = silu(x); z = silu(x); a = mul(y, z)", mul(s := silu(X), s))
    with pytest.raises(AttributeError, match=r"no other in \['x', 'y', 'z'\]"):
        _ = m.other


@pytest.mark.parametrize("text", [
    "y = mul_mat(w, x); z = add(y, b) or add(b, y)",
    "y = (out_prod | mul_mat)(w, x); z = add(b, y)",
    "y = mul_mat(w, *others); z = add(b, view(y))",
    "z = add(b, mul_mat(w, x))",
])  # fmt: skip
def test_a_pattern_may_leave_something_open(text):
    z = add(Y, dot(W, X))
    (m,) = matches(text, silu(z))
    assert (m.z, m.b, m.w, m.get("nothing")) == (z, Y, W, None)


def test_a_view_shows_what_it_looks_into():
    y = silu(X)
    graph = Graph.of(scale(reshape(y, (12,)), 2.0))
    assert len([*Pattern("y = silu(x); z = scale(view(y))").matches(graph)]) == 1
    assert not [*Pattern("y = silu(x); z = scale(y)").matches(graph)]


def test_the_nearest_come_first_and_none_out_of_reach():
    nodes = [silu(X), sqr(X), scale(X, 2.0), sqr(X), scale(X, 3.0)]
    graph = Graph.of(*nodes)
    text = "y = sqr(x); z = scale(x)"
    found = [(m.y, m.z) for m in Pattern(text).matches(graph) if m.z is nodes[4]]
    assert found == [(nodes[3], nodes[4]), (nodes[1], nodes[4])]
    near = [(m.y, m.z) for m in Pattern(text, reach=1).matches(graph)]
    assert near == [(nodes[1], nodes[2]), (nodes[3], nodes[4])]


ADDED = Rewrite(
    Pattern("y = mul_mat(w, x); z = add(b, y)"),
    lambda m: m.b.shape == m.z.shape,
    lambda m: {m.z: mul_mat_add(m.b, m.w, m.x)},
)


def names(graph):
    return [t.op.name for t in graph.nodes]


def test_what_is_matched_goes_unless_others_read_it():
    product = dot(W, X)
    assert names(by_table(Graph.of(add(Y, product)), [ADDED])) == ["mul_mat_add"]
    for others in ([silu(product)], [product], [reshape(product, (24,))]):
        graph = Graph.of(add(Y, product), *others)
        assert by_table(graph, [ADDED]) is graph
    stays = Rewrite(Pattern("_y = mul_mat(w, x); z = add(b, _y)"), ADDED.holds, ADDED.becomes)
    assert names(by_table(graph, [stays])) == ["mul_mat", "mul_mat_add", "reshape"]


def test_nodes_do_not_become_one_across_a_change_of_what_they_read():
    """What new nodes of two matches need of each other: tests/ops/test_rewrites.py."""
    product = dot(W, X)
    total, changed = add(Y, product), cpy(zeros((3, 4)), X)
    for steps, name in (([product, total], "mul_mat_add"), ([product, changed], "add")):
        graph = Graph.of(total, changed, steps=steps)
        assert name in names(by_table(graph, [ADDED]))


def test_every_op_that_the_host_s_table_names_is_one():
    assert {op for each in TABLE for op in ops_named(each.pattern)} <= OPS.keys()
