"""Roundings, and values far from zero, against plain NumPy."""

import math

import numpy as np
import pytest
from derivatives import gradients_of

from pyggml import ops
from pyggml.graph.dtypes import BF16, F16, F32
from pyggml.graph.tensor import leaf
from pyggml.look.check import check_gradient
from pyggml.runtime import run


def f32(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- types --------------------------------------------------------------------------------------

EDGES = np.array(
    [
        *(0.0, -0.0, 1.0, -1.5, 65504.0, 65519.99, 65520.0, 1e30, np.inf, -np.inf, 6e-8, 3e-8),
        *(2.9e-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 3.4e38, 1e-40, 6.1e-5),
    ],
    np.float32,
)


def test_cpy_rounds_to_half_as_numpy_does():
    with np.errstate(over="ignore"):
        wanted = EDGES.astype(np.float16)
    (found,) = run(ops.cpy(leaf(EDGES), F16))
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))


def test_cpy_rounds_to_bfloat_with_ties_to_even():
    tie = 2.0**-8
    x = np.array([1, 1 + tie, 1 + 3 * tie, -1 - 1.01 * tie, 3.4e38, np.inf], np.float32)
    wanted = np.array([1, 1, 1 + 4 * tie, -1 - 2 * tie, np.inf, np.inf], np.float32)
    (found,) = run(ops.cpy(leaf(x), BF16))
    np.testing.assert_array_equal(found, wanted.view(np.uint32) >> 16)


@pytest.mark.parametrize("kind", [F16, BF16])
def test_every_16_bit_float_survives_the_way_through_float32(kind):
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = leaf(bits.view(kind.numpy), dtype=kind)
    wide = ops.cpy(x, F32)
    (back,) = run(ops.cpy(wide, kind))
    bfloats = (bits.astype(np.uint32) << 16).view(np.float32)
    exact = bits.view(np.float16) if kind is F16 else bfloats
    number = ~np.isnan(exact)
    np.testing.assert_array_equal(run(wide)[0][number], exact[number].astype(np.float32))
    np.testing.assert_array_equal(back.view(np.uint16)[number], bits[number])
    assert np.isnan(run(wide)[0][~number]).all()


# -- values -------------------------------------------------------------------------------------

FAR = np.array([-np.inf, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 200.0, np.inf], np.float32)


@pytest.mark.parametrize(
    "build, wanted",
    [
        (ops.sigmoid, [0, 0, 0, 2.061154e-9, 0.5, 1, 1, 1, 1]),
        (ops.tanh, [-1, -1, -1, -1, 0, 1, 1, 1, 1]),
        (ops.softplus, [0, 0, 0, 2.061154e-9, math.log(2), 20, 89, 200, np.inf]),
        (ops.elu, [-1, -1, -1, -1, 0, 20, 89, 200, np.inf]),
        (ops.relu, [0, 0, 0, 0, 0, 20, 89, 200, np.inf]),
        (ops.hardsigmoid, [0, 0, 0, 0, 0.5, 1, 1, 1, 1]),
        (ops.sgn, [-1, -1, -1, -1, 0, 1, 1, 1, 1]),
        (ops.step, [0, 0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_far_from_zero(build, wanted):
    (found,) = run(build(leaf(FAR)))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-30)


def test_xielu_is_smooth_at_zero_and_linear_far_to_the_left():
    """softplus(0) = ln 2 = a_p; a_n = 1/2 + ln 2: slope 1/2 at 0, -ln 2 towards minus infinity."""
    x = np.array([-1e-3, 0.0, 1e-3, -50.0, 2.0], np.float32)
    (found,) = run(ops.xielu(leaf(x), 0.0, 0.0))
    far = (0.5 + math.log(2)) * 49 - 25
    wanted = [-5e-4, 0, 5e-4, far, 4 * math.log(2) + 1]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("build", [ops.silu, ops.gelu, ops.gelu_quick, ops.gelu_erf, ops.hardswish])
def test_gated_functions_far_from_zero(build):
    """0 to the left and x to the right, with slopes 0 and 1, and no NaN on the way."""
    x = FAR[np.isfinite(FAR)]
    (found,) = run(build(leaf(x)))
    np.testing.assert_allclose(found, np.maximum(x, 0), atol=1e-6)
    for s in check_gradient(build, [x.astype(float)], np.random.default_rng(0)):
        assert math.isfinite(s.gradient)


def test_gelu_erf_keeps_its_digits_far_to_the_left():
    x = np.linspace(-8, -1, 29, dtype=np.float32)
    phi = [0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()]
    density = np.exp(-(x.astype(float) ** 2) / 2) / math.sqrt(2 * math.pi)
    y = ops.gelu_erf(leaf(x))
    alone, gated, dx = run(y, ops.geglu_erf(leaf(x), leaf(x)), *gradients_of(y, y.src))
    np.testing.assert_allclose(alone, x * phi, rtol=1e-5)
    np.testing.assert_allclose(gated, x * x * phi, rtol=1e-5)
    np.testing.assert_allclose(dx, phi + x * density, rtol=1e-4)


def test_the_gradient_of_elu_does_not_overflow():
    x = leaf(np.array([300.0, -300.0], np.float32))
    (dx,) = gradients_of(ops.elu(x), [x])
    np.testing.assert_array_equal(run(dx)[0], [1.0, 0.0])


def test_round_takes_halves_away_from_zero():
    x = np.array([0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -0.2, 8388609.0], np.float32)
    (found,) = run(ops.round_(leaf(x)))
    np.testing.assert_array_equal(found, [1, -1, 2, 3, -3, 0, 0, 8388609])


def test_a_sum_of_a_million_is_exact_to_float32():
    x = np.full((1000, 1000), 0.1, np.float32)
    row = ops.reshape(leaf(x), (1, -1))
    found, of_row, mean = run(ops.sum_(leaf(x)), ops.sum_rows(row), ops.mean(row))
    assert found == of_row == np.float32(np.float32(0.1).astype(float) * 1e6)
    assert mean == np.float32(0.1)


def test_argmax_takes_the_first_of_equals():
    x = np.array([[1, 3, 3], [2, 2, 2], [-5, -7, -5]], np.float32)
    (found,) = run(ops.argmax(leaf(x)))
    np.testing.assert_array_equal(found, [1, 0, 0])


def test_masks_are_exact():
    x = f32((2, 3, 5))
    above = ~np.tri(3, 5, 1, dtype=bool)
    inf, zero = run(ops.diag_mask_inf(leaf(x), 1), ops.diag_mask_zero(leaf(x), 1))
    np.testing.assert_array_equal(inf, np.where(above, -np.inf, x))
    np.testing.assert_array_equal(zero, np.where(above, 0, x))


def capped_swiglu(gate, up=None, swapped=False):
    return ops.swiglu_clamp(gate, up, limit=1.25, swapped=swapped)


@pytest.mark.parametrize(
    "build",
    [
        *(ops.swiglu, ops.reglu, ops.geglu, ops.geglu_quick, ops.geglu_erf),
        *(ops.swiglu_oai, capped_swiglu),
    ],
)
def test_a_packed_gate_is_the_first_half_unless_swapped(build):
    x = f32((3, 10))
    gate, up = leaf(x[:, :5]), leaf(x[:, 5:])
    packed, swapped, wanted, turned = run(
        build(leaf(x)), build(leaf(x), swapped=True), build(gate, up), build(up, gate)
    )
    np.testing.assert_array_equal(packed, wanted)
    np.testing.assert_array_equal(swapped, turned)
