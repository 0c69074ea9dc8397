"""Shapes, strides and values at the edge of what ops accept, against plain NumPy."""

import math

import numpy as np
import pytest
from derivatives import gradients_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml import ops
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import I32, dtype
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.check import check_gradient
from pyggml.runtime import Devices, bind, run, schedule

EXAMPLES = settings(max_examples=25)
SIZES = st.sampled_from([1, 1, 2, 3, 4, 6, 7, 16, 17])


def f32(shape, seed=0):
    """Numbers of magnitude 0.5 to 2, so that none is a bad divisor."""
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1.0, 1.0], shape)
    return np.asarray(rng.uniform(0.5, 2.0, shape) * sign, np.float32)


@st.composite
def shapes(draw, least=0):
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=4)))


@st.composite
def loose(draw, least=0, kinds=(np.float32,)):
    """An array of any layout: axes in any order in memory, steps of 1 to 3 between them."""
    shape = draw(shapes(least))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    gapless = f32(tuple(shape[a] * steps[a] for a in order))
    if len(kinds) > 1:
        gapless = (8 * gapless).astype(draw(st.sampled_from(kinds)))
    whole = gapless.transpose(np.argsort(order))
    return whole[(..., *(slice(None, None, s) for s in steps))]


@st.composite
def pairs(draw):
    """A shape, and one that repeats to it: axes divided, leading ones dropped."""
    large = draw(shapes())
    divisors = [[d for d in range(1, n + 1) if n % d == 0] for n in large]
    small = [draw(st.sampled_from([1, n, *d])) for n, d in zip(large, divisors, strict=True)]
    while small and small[0] == 1 and draw(st.booleans()):
        small = small[1:]
    return large, tuple(small)


def repeated(b, shape):
    """b laid side by side until `shape` is full, one axis after the other."""
    b = b.reshape((1,) * (len(shape) - b.ndim) + b.shape)
    for axis, n in enumerate(shape):
        b = np.concatenate([b] * (n // b.shape[axis]), axis)
    return b


# -- elementwise and broadcasting ---------------------------------------------------------------


@pytest.mark.parametrize(
    "build, wanted",
    [
        (ops.add, np.add),
        (ops.sub, np.subtract),
        (ops.mul, np.multiply),
        (ops.div, np.divide),
    ],
)
@EXAMPLES
@given(shapes=pairs())
def test_the_second_operand_is_repeated(build, wanted, shapes):
    large, small = shapes
    a, b = f32(large, 1), f32(small, 2)
    (found,) = run(build(leaf(a), leaf(b)))
    np.testing.assert_array_equal(found, wanted(a, repeated(b, large)))


@EXAMPLES
@given(shapes=pairs())
def test_repeat_back_is_the_transpose_of_repeat(shapes):
    large, small = shapes
    x, y = f32(small, 1), f32(large, 2)
    forth, back = run(ops.repeat(leaf(x), large), ops.repeat_back(leaf(y), small))
    np.testing.assert_array_equal(forth, repeated(x, large))
    assert math.isclose(np.vdot(forth, y), np.vdot(x, back), rel_tol=1e-4, abs_tol=1e-3)


@EXAMPLES
@given(shapes=pairs())
def test_gradients_of_a_broadcast_product(shapes):
    large, small = shapes
    arrays = [f32(large, 1).astype(float), f32(small, 2).astype(float)]

    def build(a, b):
        return ops.mul(ops.add(a, b), b)

    for s in check_gradient(build, arrays, np.random.default_rng(3)):
        assert s.error < 1e-5


# -- moving and viewing -------------------------------------------------------------------------


@EXAMPLES
@given(x=loose(kinds=(np.float32, np.float16, np.int32, np.int64, np.int8)))
def test_a_copy_has_every_bit_and_no_gaps(x):
    dup, cont = run(ops.dup(leaf(x)), ops.cont(leaf(x)))
    for found in (dup, cont):
        assert found.dtype == x.dtype and found.flags.c_contiguous
        np.testing.assert_array_equal(found, x)


@EXAMPLES
@given(x=loose(1), data=st.data())
def test_views_of_views_see_what_numpy_sees(x, data):
    """permute, then a range of an axis, then transpose and reshape, from any layout."""
    axes = data.draw(st.permutations(range(x.ndim)))
    axis = data.draw(st.integers(0, x.ndim - 1))
    n = x.shape[axes[axis]]
    start = data.draw(st.integers(0, n - 1))
    size = data.draw(st.integers(1, n - start))
    t = ops.narrow(ops.permute(leaf(x), axes), axis, start, size)
    wanted = np.transpose(x, axes).take(range(start, start + size), axis)
    np.testing.assert_array_equal(run(t)[0], wanted)
    if x.ndim > 1:
        t, wanted = ops.transpose(t), np.swapaxes(wanted, -1, -2)
    np.testing.assert_array_equal(run(ops.reshape(t, (-1,)))[0], wanted.reshape(-1))


@EXAMPLES
@given(x=loose(1), data=st.data())
def test_what_is_cut_can_be_joined(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    n = x.shape[axis]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=3)) - {n})
    sizes = tuple(np.diff([0, *cuts, n]).tolist())
    whole, *rest = ops.split(leaf(x), sizes, axis)
    for part in rest:
        whole = ops.concat(whole, part, axis)
    np.testing.assert_array_equal(run(whole)[0], x)


@EXAMPLES
@given(data=st.data())
def test_a_window_sees_and_adds_where_numpy_does(data):
    n = data.draw(st.integers(1, 40))
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    strides = [data.draw(st.integers(0, 5)) for _ in shape]
    offset = data.draw(st.integers(0, 5))
    places = offset + sum(
        (np.arange(k).reshape(-1, *(1,) * (len(shape) - i - 1)) * s)
        for i, (k, s) in enumerate(zip(shape, strides, strict=True))
    )
    places = np.broadcast_to(places, shape)
    x, b = f32((n,), 1), f32(tuple(shape), 2)
    in_bytes = tuple(4 * s for s in strides)
    if places.max(initial=0) >= n:
        with pytest.raises(ShapeError, match="does not lie inside"):
            ops.view(leaf(x), tuple(shape), in_bytes, 4 * offset)
        return
    seen, added = run(
        ops.view(leaf(x), tuple(shape), in_bytes, 4 * offset),
        ops.acc(leaf(x), leaf(b), in_bytes, 4 * offset),
    )
    np.testing.assert_array_equal(seen, x[places])
    wanted = x.astype(float)
    np.add.at(wanted, places, b)
    np.testing.assert_allclose(added, wanted, rtol=1e-5, atol=1e-5)


def test_a_view_of_a_leaf_with_gaps_sees_the_leaf_itself():
    x = f32((4, 6))[:, ::2]
    t = ops.transpose(leaf(x))
    before, program = run(t)[0], bind(schedule(Graph.of(ops.scale(t, 2.0)), Devices()))
    x[1, 2] = 9
    program()
    np.testing.assert_array_equal(before[2, 1], f32((4, 6))[1, 4])
    np.testing.assert_array_equal(program.read(program.schedule.graph.outputs[0]), 2 * x.T)


def test_gradients_through_views():
    def build(x, y):
        a, b = ops.split(ops.permute(x, (1, 0, 2)), (1, 3))
        joined = ops.concat(ops.transpose(b), ops.transpose(a), -2)
        window = ops.view(joined, (3, 2, 2), (32, 8, 4), 4)
        return ops.mul(ops.set_(y, window, (24, 8, 4)), ops.reshape(y, (3, 1, 6)))

    arrays = [f32((2, 3, 4)).astype(float), f32((3, 1, 6), 1).astype(float)]
    for s in check_gradient(build, arrays, np.random.default_rng(0)):
        assert s.error < 1e-5


def test_halves_of_quantised_rows_keep_whole_blocks():
    raw = np.arange(2 * 3 * 68, dtype=np.uint8).reshape(2, 3, 68)
    t = leaf(raw, "w", dtype("Q8_0"))
    assert t.shape == (2, 3, 64)
    np.testing.assert_array_equal(run(ops.cont(ops.narrow(t, 2, 32, 32)))[0], raw[..., 34:])
    np.testing.assert_array_equal(run(ops.narrow(t, 0, 1, 1))[0], raw[1:])
    np.testing.assert_array_equal(run(ops.cont(ops.permute(t, (1, 0, 2))))[0], raw.swapaxes(0, 1))
    with pytest.raises(ShapeError, match="cuts a block of 32"):
        ops.narrow(t, 2, 16, 32)


# -- nothing at all -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize(
    "build",
    [
        *(ops.rms_norm, ops.norm, ops.l2_norm, ops.soft_max, ops.relu, ops.silu, ops.sqr, ops.neg),
        *(lambda x: ops.mul(x, x), lambda x: ops.div(x, ops.scale(x, 2.0)), ops.diag_mask_inf),
        *(lambda x: ops.geglu(x, x), lambda x: ops.repeat(x, x.shape), ops.sum_),
        lambda x: ops.add(x, zeros((1,))),
        lambda x: ops.rms_norm_mul(x, zeros(x.shape[-1:])),
    ],
)
def test_no_elements_give_none_and_a_gradient_of_none(build, shape):
    x = zeros(shape)
    y = build(x)
    found, dx = run(y, *gradients_of(y, [x]))
    assert found.shape == y.shape and not np.any(found)
    assert dx.shape == shape


def test_a_scan_over_no_tokens_leaves_the_state():
    state, none = leaf(f32((2, 1, 3))), zeros((0, 1, 3))
    at = zeros((0,), I32)
    y = ops.ssm_scan(state, zeros((0, 2, 1)), zeros((0, 2)), zeros((2, 3)), none, none, at)
    last, dstate = run(y.saved[0], *gradients_of(y, [state]))
    np.testing.assert_array_equal(last, state.data)
    np.testing.assert_array_equal(dstate, np.zeros((2, 1, 3)))


# -- in place -----------------------------------------------------------------------------------


def test_add_inplace_changes_its_first_source_and_nothing_else():
    whole = f32((4, 6))
    a = leaf(whole.copy())
    (found,) = run(ops.add_inplace(ops.narrow(a, 0, 1, 2), leaf(f32((6,), 1))))
    wanted = whole.copy()
    wanted[1:3] += f32((6,), 1)
    np.testing.assert_array_equal(a.data, wanted)
    np.testing.assert_array_equal(found, wanted[1:3])


def test_a_sink_is_read_before_the_softmax_is_written_over_it():
    x, sink = leaf(np.array([1.0], np.float32)), ops.scale(leaf(np.array([3.0], np.float32)), 1.0)
    (y,) = run(ops.soft_max(x, sinks=sink))
    np.testing.assert_allclose(y, 1 / (1 + np.exp(2.0)), rtol=1e-6)


def test_a_limited_gate_without_bound_has_no_slope():
    gate, up = leaf(np.array([np.inf, 1e30], np.float32)), leaf(np.array([1.0, 2.0], np.float32))
    (dgate,) = run(*gradients_of(ops.swiglu_oai(gate, up), [gate]))
    np.testing.assert_array_equal(dgate, [0, 0])


# -- refusals -----------------------------------------------------------------------------------

# What no declaration can say: arguments of builders, which are no parameters of a node, quantised
# sources and views with gaps. test_every_op.py spoils the samples of each op, one source or setting
# (`Op.refuses`) at a time.
X, Q8 = zeros((3, 8)), leaf(np.zeros((3, 34), np.uint8), dtype=dtype("Q8_0"))
REFUSED = [
    (lambda: ops.add_inplace(ops.transpose(X), zeros((8, 3))), "add_inplace: a is .*without gaps"),
    (lambda: ops.halve(zeros((3, 7))), "halve: x is .*even last axis"),
    (lambda: ops.reshape(Q8, (6, 16)), "wanted a last axis of whole blocks"),
    (lambda: ops.permute(Q8, (1, 0)), "blocks lie along the last axis"),
    (lambda: ops.view(X, (3,), (6,)), "not whole elements"),
    (lambda: ops.view(Q8, (34,), (1,)), "not whole elements"),
    (lambda: ops.split(X, (3, 4)), "split: sizes .3, 4. do not fill axis 1"),
    (lambda: ops.concat(Q8, X, 0), "concat: .* do not join along axis 0"),
    (lambda: ops.set_(X, zeros((2, 8)), (16, 4)), "set: elements of .*fall on one another"),
    (lambda: ops.get_rows(X, zeros((1, 1, 1, 1), I32)), "get_rows: a shape .* at most 4 axes"),
    (lambda: ops.swiglu(X, X, swapped=True), "wanted swapped=False"),
    (lambda: ops.soft_max(X, max_bias=8.0), "max_bias is 8.0, wanted a mask"),
]


@pytest.mark.quick
@pytest.mark.parametrize("build, sentence", REFUSED, ids=[s for _, s in REFUSED])
def test_misfits_are_refused_when_the_graph_is_built(build, sentence):
    with pytest.raises(ShapeError, match=sentence):
        build()
