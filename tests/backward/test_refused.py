"""What the reverse walk refuses before anything runs, each fault by name."""

import re

import numpy as np
import pytest
from derivatives import filled, gradients_of

from pyggml.backward import build_backward
from pyggml.errors import NoGradientError
from pyggml.graph import Graph
from pyggml.graph.dtypes import I32
from pyggml.graph.tensor import leaf, zeros
from pyggml.ops import (
    add,
    add_inplace,
    argmax,
    detach,
    floor,
    get_rows,
    linear_cross_entropy,
    mul,
    mul_mat,
    narrow,
    scale,
    sqr,
    sum_,
)
from pyggml.runtime import results, run


def test_an_op_without_gradient_is_named_with_its_layer():
    x = filled((3, 8), 0, "x")
    h = mul_mat(filled((8, 8), 1, "blk.3.ffn_up.weight"), x).named("blk.3.ffn_up")
    loss = sum_(floor(h))
    with pytest.raises(NoGradientError, match=r"floor at .*after blk\.3\.ffn_up\)"):
        gradients_of(loss, [x])


def test_a_named_node_without_gradient_is_named():
    x = filled((3, 8), 0, "x")
    whole = floor(x).named("blk.7.choice")
    with pytest.raises(NoGradientError, match=r"floor at blk\.7\.choice has no gradient \(.+\)"):
        gradients_of(sum_(whole), [x])


def test_what_is_chosen_by_number_counts_as_fixed():
    """x chooses rows and weighs them; only the weights have a gradient."""
    x, table = filled((3, 8), 0, "x"), filled((8, 2), 1)
    best = argmax(x)
    chosen = get_rows(table, best)
    loss = sum_(mul(chosen, narrow(x, 1, 0, 2)))
    (g,) = run(*gradients_of(loss, [x]))
    np.testing.assert_array_equal(g[:, :2], table.data[x.data.argmax(axis=1)])
    assert not g[:, 2:].any()


def test_a_choice_alone_is_no_way_to_the_loss():
    x = filled((3, 8), 0, "x")
    loss = sum_(get_rows(filled((8, 2), 1), argmax(x)))
    with pytest.raises(NoGradientError, match="x does not reach the loss"):
        gradients_of(loss, [x])


def test_many_faults_are_the_first_and_how_many_more():
    loss = sum_(filled((3,), name="x"))
    others = [filled((2,), name=f"p{i}") for i in range(9)]
    with pytest.raises(NoGradientError) as caught:
        build_backward(Graph.of(loss), others)
    assert str(caught.value).endswith("p4 does not reach the loss; and 4 more")


def test_an_op_without_gradient_beside_the_way_is_no_fault():
    x, p = filled((3, 8), 0, "x"), filled((3, 8), 1, "p")
    (g,) = run(*gradients_of(sum_(mul(floor(x), p)), [p]))
    np.testing.assert_array_equal(g, np.floor(x.data))


def test_an_op_without_gradient_on_the_way_to_a_choice_is_no_fault():
    """floor is reached by the parameter, but only positions come of it."""
    w, table = filled((1, 4), name="w"), filled((4, 3), 1, "table")
    chosen = get_rows(table, argmax(floor(w)))
    (dw,) = run(*gradients_of(sum_(mul(chosen, narrow(w, 1, 0, 3))), [w]))
    np.testing.assert_array_equal(dw[0, 3:], 0)
    assert np.all(dw[0, :3])


def test_numbers_that_a_gradient_needs_must_not_be_written_over():
    x, b = filled((3,), name="x"), filled((3,), 1)
    a = scale(x, 1.0).named("a")
    loss = sum_(add(sqr(a), sqr(add_inplace(a, b))))
    with pytest.raises(NoGradientError, match="needs a, over which .*add.* has written since"):
        gradients_of(loss, [x])
    y = scale(x, 2.0)
    (dx,) = run(*gradients_of(sum_(sqr(add_inplace(y, b))), [x]))  # nothing needs y as it was
    np.testing.assert_allclose(dx, 4 * (2 * x.data + b.data), rtol=1e-6)


def test_every_fault_is_in_one_error():
    x, lost, found = (filled((3, 8), i, n) for i, n in enumerate(("x", "lost", "also lost")))
    a = floor(x).named("blk.1.a")
    b = floor(scale(x, 2.0)).named("blk.2.b")
    with pytest.raises(NoGradientError) as caught:
        gradients_of(sum_(add(a, b)), [x, lost, found])
    for part in ("blk.1.a", "blk.2.b", "lost does not reach", "also lost does not reach"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sources_without_gradient_are_all_named():
    """Tokens are integers and weights are data: two faults of one op."""
    h, w = filled((3, 8), 0, "h"), filled((5, 8), 1, "output.weight")
    ids, share = zeros((3,), I32, "ids"), filled((3,), 2, "share")
    loss = linear_cross_entropy(h, w, ids, share).named("loss")
    with pytest.raises(NoGradientError) as caught:
        gradients_of(loss, [h, w, ids, share])
    error = str(caught.value)
    assert re.search(r"linear_cross_entropy at loss .* source 2 \(<ids", error)
    assert re.search(r"source 3 \(<share", error)


def test_an_integer_input_has_no_gradient():
    ids = zeros((3,), I32, "tokens")
    loss = sum_(get_rows(filled((4, 2)), ids))
    with pytest.raises(NoGradientError, match=r"get_rows at .* source 1 \(<tokens"):
        gradients_of(loss, [ids])


def test_nothing_is_computed_before_a_refusal():
    x = filled((3, 8), 0, "x")
    loss = sum_(floor(x))
    with pytest.raises(NoGradientError):
        gradients_of(loss, [x])
    assert all(t.data is None for t in Graph.of(loss).nodes)


def test_what_is_detached_counts_as_fixed():
    """d(x · detach(x)) = detach(x), and nothing behind detach gets a backward node."""
    x = leaf(np.array([2.0, -3.0], np.float32), "x")
    _, grad = results(build_backward(Graph.of(mul(x, detach(sqr(x)))), [x]))
    np.testing.assert_array_equal(grad, [4.0, 9.0])
    with pytest.raises(NoGradientError, match="x does not reach the loss"):
        build_backward(Graph.of(detach(x)), [x])
