"""Masks, ALiBi's slopes and rows at the edge of what floats hold."""

import numpy as np
import pytest
from normals import floats

from pyggml.errors import ShapeError
from pyggml.graph.tensor import leaf
from pyggml.ops.attention.softmax import soft_max
from pyggml.runtime import run


def test_masked_scores_are_exactly_zero_and_a_row_without_any_left_is_zeros():
    mask = np.zeros((3, 4), np.float32)
    mask[0, 1:], mask[1] = -np.inf, -np.inf
    (y,) = run(soft_max(leaf(floats(2, 3, 4)), leaf(mask)))
    np.testing.assert_array_equal(y[:, 0], [[1, 0, 0, 0]] * 2)
    np.testing.assert_array_equal(y[:, 1], 0)
    np.testing.assert_allclose(y[:, 2].sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize("n_head", [1, 4, 6, 12])
def test_alibi_slopes_are_ggmls(n_head):
    max_bias, mask = 8.0, -np.arange(5, dtype=np.float32)[None]
    (y,) = run(soft_max(leaf(np.zeros((n_head, 1, 5), np.float32)), leaf(mask), max_bias=max_bias))
    slopes = np.log(y[:, 0, 0] / y[:, 0, 1])
    n_log2 = 1 << int(np.log2(n_head))
    m0, m1 = 2 ** (-max_bias / n_log2), 2 ** (-max_bias / 2 / n_log2)
    want = [m0 ** (h + 1) if h < n_log2 else m1 ** (2 * (h - n_log2) + 1) for h in range(n_head)]
    np.testing.assert_allclose(slopes, want, rtol=1e-4)


@pytest.mark.parametrize("offset", [-1e4, 1e4, 3e38])
def test_large_scores_neither_overflow_nor_vanish(offset):
    x = np.array([[0, 1, 2]], np.float32) if abs(offset) < 1e30 else np.zeros((1, 3), np.float32)
    (y,) = run(soft_max(leaf(x + np.float32(offset))))
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(y, e / e.sum(), rtol=1e-3)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_the_highest_score_is_found_wherever_it_is(n):
    """With scores 200 apart, a wrong maximum overflows or leaves only zeros."""
    for at in range(n):
        x = np.full((1, n), -300, np.float32)
        x[0, at] = -100
        (y,) = run(soft_max(leaf(x)))
        assert y[0, at] == 1 and y.sum() == 1


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # without the JIT
def test_nan_is_not_hidden():
    x = floats(2, 20)
    x[0, 3], x[1, 4] = np.nan, -np.float32(np.nan)
    (y,) = run(soft_max(leaf(x)))
    assert np.all(np.isnan(y))


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (4, 4, 5), (1, 2, 4, 5), (4, 5, 5)])
def test_masks_that_do_not_fit_are_refused(shape):
    mask = leaf(np.zeros(shape, np.float32), "mask")
    with pytest.raises(ShapeError, match=r"soft_max: mask <mask .* cannot be repeated"):
        soft_max(leaf(floats(6, 4, 5)), mask)
