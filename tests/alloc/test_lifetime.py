"""From where to where memory is in use, and when a node may overwrite one of its sources."""

import numpy as np
import pytest

from pyggml.alloc.lifetime import FOREVER, lifetimes, reusable_source
from pyggml.graph import Graph
from pyggml.graph.dtypes import I32
from pyggml.graph.tensor import Tensor, zeros
from pyggml.ops import (
    add,
    add_inplace,
    flash_attn_ext,
    mul,
    mul_mat_add,
    narrow,
    reshape,
    scale,
    set_rows,
    sum_rows,
    transpose,
)

pytestmark = pytest.mark.quick


def span_of(graph: Graph, t: Tensor) -> tuple[int, int]:
    life = lifetimes(graph)[t]
    return life.first, life.last


def overwritten(graph: Graph, node: Tensor) -> Tensor | None:
    return reusable_source(node, graph.nodes.index(node), lifetimes(graph))


def test_a_result_lives_until_its_last_reader():
    x = zeros((4, 4), name="x")
    a = scale(x, 2.0)
    b = scale(a, 2.0)
    c = add(b, a)
    graph = Graph.of(c)
    assert graph.nodes == (a, b, c)
    assert span_of(graph, a) == (0, 2)
    assert span_of(graph, b) == (1, 2)
    assert span_of(graph, c) == (2, FOREVER)
    assert x not in lifetimes(graph), "a leaf has memory already"


def test_a_reader_of_a_view_keeps_the_owner():
    a = scale(zeros((4, 4)), 2.0)
    view = transpose(reshape(a, (2, 8)))
    b = scale(zeros((4, 4)), 3.0)
    c = sum_rows(view)
    graph = Graph.of(add(b, zeros((1,))), c)
    assert view not in lifetimes(graph)
    assert view.root is a
    assert span_of(graph, a)[1] == graph.nodes.index(c.src[0])  # a copy without gaps


def test_an_output_that_is_a_view_keeps_its_owner_for_ever():
    a = scale(zeros((4, 4)), 2.0)
    b = narrow(a, 0, 1, 2)
    graph = Graph.of(b, scale(a, 3.0))
    assert span_of(graph, a) == (0, FOREVER)


def test_what_is_saved_lives_from_its_node_to_its_last_reader():
    q = zeros((3, 2, 4), name="q")
    span = zeros((3, 2), I32)
    o = flash_attn_ext(q, q, q, span, 1.0)
    middle = scale(o, 2.0)
    late = scale(o.saved[0], 2.0)
    graph = Graph.of(middle, late)
    assert graph.nodes == (o, middle, o.saved[0], late)
    assert span_of(graph, o.saved[0]) == (0, 3), "written with o, not where the order lists it"
    assert span_of(graph, o) == (0, 1)
    alone = Graph.of(late)
    assert span_of(alone, o) == (0, 0), "a saved tensor does not read the node it belongs to"


def test_what_is_saved_for_nobody_lives_while_it_is_written():
    q = zeros((3, 2, 4), name="q")
    o = flash_attn_ext(q, q, q, zeros((3, 2), I32), 1.0)
    graph = Graph.of(scale(scale(o, 2.0), 2.0))
    assert span_of(graph, o.saved[0]) == (0, 0)


def test_a_node_in_anothers_memory_owns_none():
    total = scale(zeros((4, 4)), 2.0)
    more = add_inplace(total, zeros((4,)))
    rows = set_rows(more, zeros((1, 4)), zeros((1,), I32))
    graph = Graph.of(scale(zeros((4, 4)), 3.0), scale(rows, 2.0))
    assert total in lifetimes(graph)
    assert more not in lifetimes(graph)
    assert rows not in lifetimes(graph)
    assert span_of(graph, total)[1] == len(graph.nodes) - 1


# -- reuse --------------------------------------------------------------------------------------


def test_an_elementwise_node_overwrites_a_dying_source():
    a, b = scale(zeros((4, 4)), 2.0), scale(zeros((4, 4)), 3.0)
    c = add(a, b)
    assert overwritten(Graph.of(c), c) is a
    assert overwritten(Graph.of(c, a), c) is b
    assert overwritten(Graph.of(c, a, b), c) is None


def test_a_leaf_is_never_overwritten():
    c = scale(zeros((4, 4)), 2.0)
    assert overwritten(Graph.of(c), c) is None


def test_a_repeated_source_is_not_overwritten():
    small = scale(zeros((4,)), 2.0)
    c = add(zeros((4, 4)), small)
    assert overwritten(Graph.of(c), c) is None


def test_a_source_seen_through_two_windows_is_not_overwritten():
    a = scale(zeros((4, 4)), 2.0)
    both = add(a, narrow(a, 0, 1, 1))
    assert overwritten(Graph.of(both), both) is None
    same = mul(a, a)
    assert overwritten(Graph.of(same), same) is a
    reshaped = add(reshape(a, (2, 8)), reshape(a, (2, 8)))
    assert overwritten(Graph.of(reshaped), reshaped) is a


def test_a_part_of_a_source_is_not_overwritten():
    a = scale(zeros((4, 4)), 2.0)
    c = scale(narrow(a, 0, 0, 2), 2.0)
    assert overwritten(Graph.of(c), c) is None


def test_a_transposed_source_is_not_overwritten():
    """Its elements lie elsewhere than the result's."""
    a = scale(zeros((4, 4)), 2.0)
    node = mul_mat_add(transpose(a), zeros((4, 8)), zeros((4, 8)))
    assert node.src[0].shape == node.shape
    assert not node.src[0].is_contiguous
    assert overwritten(Graph.of(node), node) is None


def test_another_type_is_not_overwritten():
    q = zeros((3, 2, 4))
    span = zeros((3, 2), I32)
    o = flash_attn_ext(q, q, q, span, 1.0)
    assert overwritten(Graph.of(o), o) is None
    assert np.dtype(o.dtype.numpy) == np.float32


def test_a_product_is_added_in_place_of_its_first_source_only():
    y, x = scale(zeros((4, 4)), 2.0), scale(zeros((4, 4)), 3.0)
    node = mul_mat_add(y, zeros((4, 4)), x)
    assert overwritten(Graph.of(node), node) is y
    assert overwritten(Graph.of(node, y), node) is None


def test_a_product_is_not_added_over_a_factor_of_its_own():
    y = scale(zeros((4, 4)), 2.0)
    as_x = mul_mat_add(y, zeros((4, 4)), y)
    assert overwritten(Graph.of(as_x), as_x) is None
    as_w = mul_mat_add(y, y, zeros((4, 4)))
    assert overwritten(Graph.of(as_w), as_w) is None


def test_what_is_added_is_never_the_second_source():
    """Of a + W x the first source may be overwritten, W and x may not, though they die."""
    w = scale(zeros((4, 4)), 2.0)
    node = mul_mat_add(zeros((4, 4)), w, zeros((4, 4)))
    assert overwritten(Graph.of(node), node) is None
