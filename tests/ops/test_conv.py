"""Convolutions and pooling: two ways to the same numbers, and examples worked out by hand."""

import numpy as np
import pytest
from derivatives import gradients_of

from pyggml import ops
from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.check import check_gradient
from pyggml.runtime import run


def numbers(rng, *shape):
    return leaf(rng.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("geometry", [((1, 1), (0, 0), (1, 1)), ((2, 1), (3, 1), (1, 2))])
def test_rows_and_a_product_give_what_the_direct_way_gives(rng, geometry):
    w, x = numbers(rng, 5, 3, 2, 3), numbers(rng, 2, 3, 7, 8)
    results = []
    for build in (ops.conv_2d, ops.conv_2d_direct):
        y = build(w, x, *geometry)
        seed = leaf(np.linspace(-1, 1, y.n_elements, dtype=np.float32).reshape(y.shape))
        results.append(run(y, *gradients_of(y, [w, x], seed)))
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_one_axis_is_two_with_a_height_of_one(rng):
    w, x = numbers(rng, 4, 3, 5), numbers(rng, 2, 3, 20)
    (y,) = run(ops.conv_1d(w, x, stride=2, padding=3, dilation=2))
    wide = np.pad(x.data, ((0, 0), (0, 0), (3, 3)))
    for i in range(y.shape[2]):
        seen = wide[:, :, 2 * i : 2 * i + 9 : 2]
        np.testing.assert_allclose(y[:, :, i], np.einsum("nck,ock->no", seen, w.data), atol=1e-5)


def test_channels_of_a_depthwise_convolution_do_not_meet(rng):
    w, x = numbers(rng, 3, 1, 2, 2), numbers(rng, 1, 3, 4, 4)
    (together,) = run(ops.conv_2d_dw(w, x))
    for c in range(3):
        own = leaf(w.data[c : c + 1]), leaf(x.data[:, c : c + 1])
        np.testing.assert_allclose(together[:, c], run(ops.conv_2d(*own))[0][:, 0], atol=1e-6)


def test_a_transposed_convolution_puts_the_kernel_down_at_every_element():
    w = leaf(np.array([[[1, 2, 4]]], np.float32))
    x = leaf(np.array([[[1, 10, 100]]], np.float32))
    (y,) = run(ops.conv_transpose_1d(w, x, stride=2))
    np.testing.assert_array_equal(y[0, 0], [1, 2, 4 + 10, 20, 40 + 100, 200, 400])


@pytest.mark.parametrize("padding", [(0, 0), (1, 0)])
def test_gradients_of_a_transposed_convolution(rng, padding):
    def build(w, x):
        return ops.conv_transpose_2d(w, x, 2, padding)

    for s in check_gradient(build, [rng.random((3, 2, 3, 2)), rng.random((2, 3, 4, 5))], rng):
        assert s.error < 1e-5


def test_pooling_by_hand():
    x = leaf(np.array([1, 5, 3, 2, 4], np.float32))
    top, inside = run(ops.pool_1d(x, "max", 3, 2, 1), ops.pool_1d(x, "avg", 3, 2, 1))
    np.testing.assert_array_equal(top, [5, 5, 4])
    np.testing.assert_allclose(inside, [3, 10 / 3, 3], rtol=1e-6)
    (with_zeros,) = run(ops.pool_2d(ops.reshape(x, (1, 1, 1, 5)), "avg", (1, 3), (1, 2), (0, 1)))
    np.testing.assert_allclose(with_zeros[0, 0, 0], [2, 10 / 3, 2], rtol=1e-6)


def test_the_gradient_of_a_maximum_goes_to_the_first_of_equals():
    x = leaf(np.array([7, 7, 1, 7], np.float32))
    (dx,) = run(*gradients_of(ops.pool_1d(x, "max", 2, 1), [x]))
    np.testing.assert_array_equal(dx, [1, 1, 0, 1])


@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_maximum_that_stands_nowhere_is_refused(wrong):
    dy, where = zeros((1, 1, 1, 1)), leaf(np.full((1, 1, 1, 1), wrong, np.int32))
    with pytest.raises(PyggmlError, match=f"pool_max_back: id {wrong} is none of the 4 rows"):
        run(ops.OPS["pool_max_back"](dy, where, of=(1, 1, 2, 2)))


X = zeros((1, 2, 5, 5))


@pytest.mark.parametrize(
    "build, sentence",
    [
        (lambda: ops.conv_2d_direct(zeros((3, 1, 2, 2)), X), "wanted 1 groups of channels"),
        (lambda: ops.conv_2d(zeros((3, 1, 2, 2)), X), "wanted the channels of"),
        (lambda: ops.conv_2d(zeros((3, 2, 6, 1)), X), "does not fit into"),
        (lambda: ops.conv_2d_direct(zeros((3, 2, 1, 6)), X), "w in x"),
        (lambda: ops.conv_2d_direct(zeros((3, 2, 1, 1)), X, (0, 1)), "stride .0, 1."),
        (lambda: ops.im2col(X, (1, 1), padding=(-1, 0)), "padding .-1, 0."),
        (lambda: ops.pool_2d(X, "sum", (1, 1), (1, 1)), "kind is 'sum'"),
        (lambda: ops.pool_2d(X, "max", (6, 1), (1, 1)), "do not fit into"),
        (lambda: ops.pool_2d(X, "max", (2, 2), (1, 1), (2, 0)), "padding .2, 0."),
    ],
)
def test_misfits_are_refused(build, sentence):
    with pytest.raises(ShapeError, match=sentence):
        build()
