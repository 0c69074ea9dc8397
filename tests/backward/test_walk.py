"""The reverse walk: what it adds up and what it leaves out."""

import numpy as np
import pytest
from derivatives import filled, gradients_of

from pyggml.backward import Keep, build_backward, rematerialise, round_large
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.check import check_gradient
from pyggml.ops import (
    add,
    div,
    flash_attn_ext,
    get_rows,
    mul,
    mul_mat,
    narrow,
    permute,
    repeat,
    reshape,
    rms_norm_mul,
    scale,
    set_rows,
    sqr,
    sum_,
    transpose,
)
from pyggml.runtime import Devices, bind, results, run, schedule

pytestmark = pytest.mark.quick


def assert_gradients(build, *arrays, rng, wrt=None):
    for slope in check_gradient(build, arrays, rng, wrt):
        assert slope.error < 1e-5, slope


# -- pruning ---------------------------------------------------------------------------------------


def layers(depth):
    """A loss after `depth` products, and their weights."""
    weights = [filled((8, 8), i, f"w{i}") for i in range(depth)]
    h = filled((3, 8), 99, "x")
    for w in weights:
        h = sqr(mul_mat(w, h))
    return sum_(h), weights


def n_added(loss, parameters):
    """How many nodes the gradients need beyond those of the loss."""
    grads = gradients_of(loss, parameters)
    forward = set(Graph.of(loss).nodes)
    return sum(t not in forward for t in Graph.of(*grads).nodes)


def test_layers_before_the_first_parameter_get_no_backward_node():
    deep, of_deep = layers(12)
    flat, of_flat = layers(2)
    assert n_added(deep, of_deep[-1:]) == n_added(flat, of_flat[-1:])
    assert n_added(deep, of_deep[:1]) > n_added(deep, of_deep[6:7]) > n_added(deep, of_deep[-1:])


def test_only_parameters_get_a_weight_gradient():
    loss, weights = layers(5)
    grads = gradients_of(loss, [weights[3]])
    shapes = [t.shape for t in Graph.of(*grads).nodes if t.op.name == "out_prod"]
    assert shapes.count((8, 8)) == 1  # dw of w3; its input's gradient is needed by nobody
    assert shapes.count((3, 8)) == 1  # the gradient that flows through w4


def test_a_branch_without_parameters_is_left_alone():
    p, x = filled((4, 4), 1, "p"), filled((4, 4), 2, "x")
    side = mul_mat(x, sqr(mul_mat(x, x)))
    loss = sum_(mul(side, p))
    grads = gradients_of(loss, [p])
    names = [t.op.name for t in Graph.of(*grads).nodes]
    assert "out_prod" not in names
    assert names.count("mul_mat") == 2


# -- sums ------------------------------------------------------------------------------------------


def test_fan_out_adds_up(rng):
    def build(x, y):
        a = mul(x, y)
        return add(add(mul(a, x), scale(a, 3.0)), mul(a, a))

    assert_gradients(build, rng.standard_normal((4, 5)), rng.standard_normal((4, 5)), rng=rng)


def test_one_tensor_as_every_source(rng):
    assert_gradients(lambda x: mul(x, x), rng.standard_normal((4, 5)), rng=rng)
    assert_gradients(lambda x: mul_mat(x, x), rng.standard_normal((4, 5)), rng=rng)
    assert_gradients(lambda x: div(x, add(sqr(x), sqr(x))), rng.uniform(1, 2, (3, 3)), rng=rng)


def test_products_are_added_as_they_are_made(rng):
    """x in three products, and beside them: their gradients are one sum, in one node each, and the
    gradient that goes on to y stays as it was."""

    def build(x, y, v, w):
        both = add(x, y)
        return add(both, add(mul_mat(v, both), add(mul_mat(w, both), mul_mat(v, both))))

    arrays = [rng.standard_normal(shape) for shape in ((3, 5), (3, 5), (5, 5), (5, 5))]
    assert_gradients(build, *arrays, rng=rng)
    leaves = [leaf(a.astype(np.float32)) for a in arrays]
    grads = gradients_of(build(*leaves), leaves[:2])
    names = [t.op.name for t in Graph.of(*grads).nodes if t.op.name != "add"]
    assert names.count("out_prod_add") == 3 and "out_prod" not in names


@pytest.mark.parametrize("small", [(5,), (1, 5), (4, 1), (1, 1), (2, 5), (1, 4, 5)])
def test_repeated_sources_get_the_sum_over_their_copies(small, rng):
    arrays = rng.standard_normal((2, 4, 5)), rng.uniform(1, 2, small)
    for op in (add, mul, div):
        assert_gradients(lambda x, y, op=op: sqr(op(x, y)), *arrays, rng=rng)
    assert_gradients(lambda x: sqr(repeat(x, (2, 4, 5))), arrays[1], rng=rng)


@pytest.mark.parametrize(
    ("w", "x"),
    [
        ((3, 6), (2, 5, 6)),
        ((2, 3, 6), (4, 5, 6)),
        ((2, 1, 3, 6), (2, 4, 5, 6)),
        ((1, 2, 3, 6), (4, 2, 5, 6)),
        ((2, 2, 3, 6), (4, 6, 5, 6)),
    ],
)
def test_weights_shared_by_batches_get_the_sum_over_them(w, x, rng):
    assert_gradients(mul_mat, rng.standard_normal(w), rng.standard_normal(x), rng=rng)


def test_views_and_copies(rng):
    def build(x):
        heads = permute(reshape(x, (4, 2, 3)), (1, 0, 2))
        part = narrow(heads, 1, 1, 2)
        return mul(transpose(part), add(transpose(part), reshape(narrow(x, 0, 0, 2), (2, 3, 2))))

    assert_gradients(build, rng.standard_normal((4, 6)), rng=rng)


def test_gradients_with_gaps_reach_packed_weights(rng):
    """The gradient of a transposed product comes as a view; F16 rows are walked whole."""
    w = leaf(rng.standard_normal((6, 32)).astype(np.float16), "w")
    x = rng.standard_normal((5, 32))
    assert_gradients(lambda x: sqr(transpose(mul_mat(w, x))), x, rng=rng)
    assert_gradients(lambda x: sqr(narrow(mul_mat(w, x), 1, 1, 3)), x, rng=rng)
    assert_gradients(lambda x: sqr(mul_mat(w, transpose(x))), x.T.copy(), rng=rng)


def test_what_is_written_over_has_no_gradient_and_what_is_written_has(rng):
    ids = np.array([2, 0], np.int32)

    def build(cache, rows, ids):
        return sqr(set_rows(scale(cache, 1.0), rows, ids))

    assert_gradients(build, rng.standard_normal((4, 3)), rng.standard_normal((2, 3)), ids, rng=rng)


def test_rows_taken_twice_get_both_gradients(rng):
    ids = np.array([1, 1, 3], np.int32)
    table = rng.standard_normal((4, 6))
    assert_gradients(lambda t, i: sqr(get_rows(t, i)), table, ids, rng=rng)


def test_attention_and_norm(rng):
    seen = np.stack([np.zeros(6), np.arange(6) + 1], axis=1).astype(np.int32)

    def build(x, w, span):
        h = reshape(rms_norm_mul(x, w), (6, 2, 4))
        return flash_attn_ext(h, h, h, span, 0.5)

    arrays = rng.standard_normal((6, 8)), rng.uniform(0.5, 2, 8), seen
    assert_gradients(build, *arrays, rng=rng)


# -- what may be asked for -------------------------------------------------------------------------


def test_any_tensor_on_the_way_can_be_a_parameter(rng):
    x = filled((3, 4), 1)
    middle = scale(x, 2.0)
    loss = sum_(sqr(middle))
    dx, dm = run(*gradients_of(loss, [x, middle]))
    np.testing.assert_allclose(dm, 4 * x.data, rtol=1e-6)
    np.testing.assert_allclose(dx, 8 * x.data, rtol=1e-6)


def test_the_gradient_of_the_loss_is_the_seed():
    loss = sum_(filled((3,)))
    seed = filled((), 5)
    assert gradients_of(loss, [loss], seed) == [seed]
    (ones,) = run(*gradients_of(loss, [loss]))
    assert ones == 1


def test_a_parameter_asked_for_twice():
    x = filled((3,))
    first, second = run(*gradients_of(sum_(sqr(x)), [x, x]))
    np.testing.assert_array_equal(first, second)


def test_gradients_are_named_after_their_parameters():
    x = filled((3,), name="blk.0.norm")
    (g,) = gradients_of(sum_(sqr(x)), [x])
    assert g.name == "d(blk.0.norm)"


def test_a_seed_weighs_the_elements(rng):
    x = filled((3, 4))
    seed = filled((3, 4), 7)
    (g,) = run(*gradients_of(sqr(x), [x], seed))
    np.testing.assert_allclose(g, 2 * x.data * seed.data, rtol=1e-6)
    with pytest.raises(ShapeError, match=r"the seed for .* is .*\[4, 3\].*, wanted its shape"):
        gradients_of(sqr(x), [x], zeros((4, 3)))


# -- accumulators ----------------------------------------------------------------------------------


def test_runs_add_up_in_the_accumulators():
    x, w = filled((3, 8), 1, "x"), filled((8, 8), 2, "w")
    loss = sum_(sqr(mul_mat(w, x)))
    once = run(*gradients_of(loss, [x, w]))
    sums = [zeros((3, 8), name="dx"), zeros((8, 8), name="dw")]
    views = gradients_of(loss, [x, w], accumulators=sums)
    program = bind(schedule(Graph.of(*views), Devices()))
    for n in (1, 2, 3):
        program()
        for total, g in zip(sums, once, strict=True):
            np.testing.assert_allclose(total.data, n * g, rtol=1e-6)
    for view, total in zip(views, sums, strict=True):
        assert view.root is total
        assert np.shares_memory(array(view), array(total))


def test_a_gradient_is_added_as_soon_as_it_is_complete():
    """So that neither it nor what it was made of waits for the end of the backward pass."""
    loss, weights = layers(6)
    sums = [zeros((8, 8)) for _ in weights]
    graph = build_backward(Graph.of(loss), weights, accumulators=sums)
    nodes, views = graph.nodes, graph.outputs[1:]
    places = [nodes.index(view) for view in views]
    assert places == sorted(places, reverse=True)
    assert places[0] - places[-1] > len(nodes) / 3
    assert all(nodes.index(view) - nodes.index(view.src[1]) < 6 for view in views)


def test_a_parameter_of_several_layers_is_added_once_it_has_all_its_parts():
    w, h = filled((4, 4), 1, "w"), filled((3, 4), 2)
    for _ in range(3):
        h = sqr(mul_mat(w, h))
    once = run(*gradients_of(sum_(h), [w]))[0]
    total = zeros((4, 4))
    run(*gradients_of(sum_(h), [w], accumulators=[total]))
    np.testing.assert_array_equal(total.data, once)


def test_parts_of_one_buffer_can_be_accumulators():
    """How a trainer keeps the gradients of all parameters flat."""
    flat = np.zeros(8, np.float32)
    x, y = filled((2, 2), 1), filled((4,), 2)
    loss = add(sum_(sqr(x)), sum_(sqr(y)))
    sums = [leaf(flat[:4].reshape(2, 2)), leaf(flat[4:])]
    run(*gradients_of(loss, [x, y], accumulators=sums))
    np.testing.assert_allclose(flat, [*2 * x.data.ravel(), *2 * y.data], rtol=1e-6)


@pytest.mark.parametrize("shapes", [[], [(4, 4)], [(3, 4), (3, 4)]])
def test_accumulators_of_another_shape_are_refused(shapes):
    x = filled((3, 4))
    with pytest.raises(ShapeError, match="accumulator"):
        gradients_of(sum_(x), [x], accumulators=[zeros(s) for s in shapes])


def test_outputs_are_named_after_the_parameters():
    x, w, alike, nameless = (zeros((4,), name=n) for n in ("x", "w", "w", ""))
    loss, further = sum_(mul(mul(x, w), mul(alike, nameless))), sqr(x)
    graph = build_backward(Graph.of(further=further, loss=loss), [x, w, alike, nameless])
    assert graph.names == ("loss", "grad:x", "grad:1", "grad:2", "grad:3", "further")
    assert graph["loss"] is loss and graph["further"] is further
    graph = build_backward(Graph.of(loss), {"a": x, "b": w})
    assert list(graph.outputs_of("grad")) == ["a", "b"]
    for made in (round_large(graph, BF16), rematerialise(graph, Keep.LAYERS)):
        assert made.names == graph.names


def test_an_output_that_the_loss_does_not_need_is_computed():
    x, w = (leaf(np.float32([1, 2, 3]), n) for n in "xw")
    forward = Graph.of(loss=sum_(mul(x, w)), further=sqr(x))
    loss, dw, further = results(build_backward(forward, [w]))
    assert loss == 14
    np.testing.assert_array_equal(dw, [1, 2, 3])
    np.testing.assert_array_equal(further, [1, 4, 9])


# -- which node belongs to which -------------------------------------------------------------------


def marks(graph):
    """What a listing says of each node of the backward pass, by the node's op."""
    lines = [line.partition("<- ") for line in str(graph).splitlines()]
    return [(line.split()[1], mark) for line, _, mark in lines if mark]


def test_a_listing_says_what_each_backward_node_belongs_to():
    x, w = filled((3, 4), 0, "x"), filled((4, 4), 1, "w")
    loss = sum_(sqr(add(mul_mat(w, x), x))).named("loss")
    graph = build_backward(Graph.of(loss), [x, w])
    assert marks(graph) == [
        ("repeat", "backward of 3 loss"),
        ("sqr_back", "backward of 2 sqr"),
        ("out_prod", "backward of 0 mul_mat"),
        ("transpose", "backward of 0 mul_mat"),
        ("out_prod_add", "adds up the gradients of x"),
    ]
    assert not marks(Graph.of(loss))


def test_additions_to_accumulators_are_sums_of_gradients_too():
    w = filled((4, 4), 1, "w")
    graph = build_backward(Graph.of(sum_(sqr(w))), [w], accumulators=[zeros((4, 4))])
    assert marks(graph)[-1] == ("add", "adds up the gradients of w")


def test_passes_keep_what_belongs_to_which():
    x, w = filled((3, 8), 0, "x"), filled((8, 8), 1, "w")
    h = sqr(mul_mat(w, x))
    loss = sum_(mul_mat(w, h)).named("loss")
    graph = build_backward(Graph.of(loss), [w])
    again = rematerialise(graph, Keep.COSTLY)
    assert marks(again) == [marks(graph)[0], ("sqr", "in the backward pass"), *marks(graph)[1:]]
