"""Numbers and shapes at the edge of single ops, against NumPy and ggml's rules."""

import math

import numpy as np
import pytest

from pyggml import ops
from pyggml.errors import ShapeError
from pyggml.graph.tensor import leaf
from pyggml.runtime import run

pytestmark = pytest.mark.quick


def f32(*values):
    return leaf(np.array(values, np.float32))


def test_exp_reaches_as_far_as_a_float32():
    largest = np.float32(88.72283)
    x = np.array(
        [88.3, 88.37, 88.371, 88.5, 88.7, 88.72, largest, 88.7229, 1e9, np.inf], np.float32
    )
    (found,) = run(ops.exp(leaf(x)))
    with np.errstate(over="ignore"):
        wanted = np.exp(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(found, wanted, rtol=5e-7)
    assert np.isnan(run(ops.exp(f32(np.nan)))[0]).all()
    every = np.linspace(88.3, largest, 10_000, dtype=np.float32)
    np.testing.assert_allclose(run(ops.exp(leaf(every)))[0], np.exp(every), rtol=5e-7)


def test_align_corners_stretches_the_last_two_axes_alone():
    x = np.arange(7, dtype=np.float32).reshape(1, 7, 1, 1) * np.ones((1, 7, 2, 2), np.float32)
    for mode in ("nearest", "bilinear", "bicubic"):
        (y,) = run(ops.upscale(leaf(x), (1, 11, 4, 4), mode, align_corners=True))
        assert y[0, :, 0, 0].tolist() == [i * 7 // 11 for i in range(11)]


def test_without_yarn_its_settings_are_not_read():
    positions = leaf(np.arange(3, dtype=np.int32))
    for betas in ({}, {"beta_fast": 0.0, "beta_slow": 0.0}, {"beta_slow": -1.0}):
        (found,) = run(ops.rope_table(positions, n_dims=8, **betas))
        np.testing.assert_array_equal(found, run(ops.rope_table(positions, n_dims=8))[0])
    with pytest.raises(ShapeError, match="beta_fast is 0"):
        ops.rope_table(positions, n_dims=8, ext_factor=1.0, n_ctx_orig=64, beta_fast=0.0)


@pytest.mark.parametrize("eps", [-1e-6, 0.0, 0.3, math.inf])
def test_xielu_takes_any_eps(eps):
    """By ggml's formula; an eps above 0 bounds nothing."""
    x = np.array([-3, -0.5, -1e-3, 0, 0.2, 2], np.float32)
    (found,) = run(ops.xielu(leaf(x), 0.3, 0.7, 0.5, eps))
    a_n, a_p = 0.5 + math.log1p(math.exp(0.3)), math.log1p(math.exp(0.7))
    left = (np.expm1(np.minimum(x, eps)) - x) * a_n + 0.5 * x
    np.testing.assert_allclose(found, np.where(x > 0, a_p * x * x + 0.5 * x, left), rtol=1e-5)
    assert np.isfinite(found).all()


def test_windows_may_be_empty():
    x = leaf(np.ones((4, 6), np.float32))
    views = [
        ops.view(x, (0, 6), (24, 4)), ops.view(x, (2, 0), (24, 4), 96), ops.narrow(x, 0, 0, 0),
        ops.narrow(x, 1, 6, 0), ops.split(x, (0, 4), axis=0)[0],
    ]  # fmt: skip
    for t in views:
        (found,) = run(t)
        assert found.shape == t.shape and not found.size
        assert run(ops.sum_(ops.sqr(t)))[0] == 0
    a = leaf(np.ones((4, 6), np.float32))
    empty = leaf(np.ones((0, 6), np.float32))
    np.testing.assert_array_equal(run(ops.acc(a, empty, (24, 4)))[0], 1)
    for shape, offset in (((0, 6), 100), ((-1, 6), 0)):
        with pytest.raises(ShapeError, match="does not lie inside"):
            ops.view(x, shape, (24, 4), offset)
    with pytest.raises(ShapeError, match="does not lie inside"):
        ops.narrow(x, 0, 5, 0)
