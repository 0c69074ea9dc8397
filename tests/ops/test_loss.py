"""Sparse targets against dense labels, targets outside the vocabulary, and extreme logits."""

import numpy as np
import pytest
from normals import floats

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops.loss.loss import (
    cross_entropy_loss,
    cross_entropy_loss_back,
    cross_entropy_rows,
    cross_entropy_rows_back,
)
from pyggml.runtime import run

ONE = leaf(np.array(1, np.float32))


def ids(*targets: int) -> Tensor:
    return leaf(np.array(targets, np.int32), "targets")


def test_one_right_answer_is_a_one_hot_label():
    x, targets = leaf(floats(4, 70)), ids(0, 69, 7, 7)
    labels = leaf(np.eye(70, dtype=np.float32)[targets.data])
    weights = leaf(np.full(4, 0.25, np.float32))
    sparse, dense, sparse_dx, dense_dx = run(
        cross_entropy_rows(x, targets, weights),
        cross_entropy_loss(x, labels),
        cross_entropy_rows_back(ONE, x, targets, weights),
        cross_entropy_loss_back(ONE, x, labels),
    )
    np.testing.assert_allclose(sparse, dense, rtol=1e-6)
    np.testing.assert_allclose(sparse_dx, dense_dx, rtol=1e-5, atol=1e-8)


def test_labels_that_sum_to_zero_pull_nowhere():
    """Where ggml subtracts them from a whole softmax: a row can be masked by zeroing its labels."""
    x, labels = leaf(floats(3, 9)), leaf(np.zeros((3, 9), np.float32))
    loss, dx = run(cross_entropy_loss(x, labels), cross_entropy_loss_back(ONE, x, labels))
    assert loss == 0 and not np.any(dx)


def test_rows_of_weight_zero_do_not_count():
    x = floats(2, 9)
    x[1] = 1e30
    weights = leaf(np.array([1, 0], np.float32))
    loss, dx = run(
        cross_entropy_rows(leaf(x), ids(3, 4), weights),
        cross_entropy_rows_back(ONE, leaf(x), ids(3, 4), weights),
    )
    x64 = x[0].astype(np.float64)
    np.testing.assert_allclose(loss, np.log(np.exp(x64).sum()) - x64[3], rtol=1e-6)
    assert not np.any(dx[1])


@pytest.mark.parametrize("offset", [-1e5, 1e5])
def test_extreme_logits_stay_finite(offset):
    x = np.float32(offset) + np.array([[0, 64, -64]], np.float32)
    loss, dx = run(
        cross_entropy_rows(leaf(x), ids(2), leaf(np.ones(1, np.float32))),
        cross_entropy_rows_back(ONE, leaf(x), ids(2), leaf(np.ones(1, np.float32))),
    )
    np.testing.assert_allclose(loss, 128, rtol=1e-6)
    np.testing.assert_allclose(dx, [[0, 1, -1]], atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, -100, 9, 2**31 - 1])
def test_a_target_outside_the_vocabulary_is_refused(wrong):
    x, targets, weights = leaf(floats(2, 9)), ids(0, wrong), leaf(np.zeros(2, np.float32))
    message = f"target {wrong} of row 1 is outside the vocabulary of 9"
    with pytest.raises(PyggmlError, match=message):
        run(cross_entropy_rows(x, targets, weights))
    with pytest.raises(PyggmlError, match=message):
        run(cross_entropy_rows_back(ONE, x, targets, weights))


def test_misfits_are_refused():
    x = leaf(floats(2, 9))
    with pytest.raises(ShapeError, match=r"labels is .* wanted F32\[2, 9\]"):
        cross_entropy_loss(x, leaf(floats(9)))
    with pytest.raises(ShapeError, match=r"targets is .* wanted I32\[2\]"):
        cross_entropy_rows(x, ids(1, 2, 3), leaf(floats(2)))
    with pytest.raises(ShapeError, match=r"d is .* wanted F32\[\]"):
        cross_entropy_loss_back(leaf(floats(1)), x, x)
