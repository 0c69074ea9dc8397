"""What rotary positions are for, and the cases that ggml's formula distinguishes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from normals import floats

from pyggml.errors import ShapeError
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops.attention.rope import rope, rope_apply, rope_apply_back
from pyggml.ops.attention.rope_table import rope_table
from pyggml.runtime import run


def places(*positions: int) -> Tensor:
    return leaf(np.array(positions, np.int32), "positions")


@given(
    m=st.integers(0, 2000),
    n=st.integers(0, 2000),
    shift=st.integers(0, 2000),
    mode=st.sampled_from(["normal", "neox"]),
)
def test_scores_depend_on_the_distance_only(m, n, shift, mode):
    qk = leaf(floats(4, 1, 32))
    at = places(m, n, m + shift, n + shift)
    same = leaf(np.concatenate([qk.data[:2], qk.data[:2]]))
    (y,) = run(rope(same, at, mode=mode, n_dims=32))
    assert abs(np.sum(y[0] * y[1]) - np.sum(y[2] * y[3])) < 1e-4


@pytest.mark.parametrize("freq_base", [1e4, 1e6])
def test_the_table_is_exact_below_1000_positions(freq_base):
    at = np.arange(1000, dtype=np.int32)
    (table,) = run(rope_table(leaf(at), n_dims=128, freq_base=freq_base))
    angle = at[:, None] * np.longdouble(freq_base) ** (-np.arange(64, dtype=np.longdouble) / 64)
    want = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    assert np.sum((table - want) ** 2) / np.sum(want**2) < 1e-14


def test_position_zero_changes_nothing_and_the_rest_of_a_head_is_copied():
    x = floats(2, 3, 16)
    for mode in ("normal", "neox"):
        (y,) = run(rope(leaf(x), places(0, 7), mode=mode, n_dims=8))
        np.testing.assert_array_equal(y[0], x[0])
        np.testing.assert_array_equal(y[1, :, 8:], x[1, :, 8:])
        assert np.all(y[1, :, 0] != x[1, :, 0])


def test_the_modes_turn_different_pairs_by_the_same_angles():
    x, at = floats(4, 2, 16), places(3, 1, 4, 15)
    (normal,) = run(rope(leaf(x), at, mode="normal", n_dims=16))
    halves = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    (neox,) = run(rope(leaf(halves), at, mode="neox", n_dims=16))
    np.testing.assert_array_equal(neox[..., :8], normal[..., ::2])
    np.testing.assert_array_equal(neox[..., 8:], normal[..., 1::2])


@pytest.mark.parametrize("mode", ["normal", "neox"])
def test_back_is_the_inverse_rotation(mode):
    x = leaf(floats(4, 2, 16))
    table = rope_table(places(3, 1, 4, 15), n_dims=12)
    (y,) = run(rope_apply_back(rope_apply(x, table, mode), table, mode))
    np.testing.assert_allclose(y, x.data, atol=1e-6)


def test_linear_scaling_and_frequency_factors_divide_the_angle():
    at, factors = places(8, 80), leaf(np.array([1, 2, 4, 8], np.float32))
    scaled, divided, plain = run(
        rope_table(at, n_dims=8, freq_scale=0.125),
        rope_table(at, factors, n_dims=8),
        rope_table(places(1, 10), n_dims=8),
    )
    np.testing.assert_allclose(scaled, plain, atol=1e-6)
    fast = 8 * 10000.0 ** (-np.arange(4) / 4) / factors.data
    np.testing.assert_allclose(divided[0], [np.cos(fast), np.sin(fast)], atol=1e-6)


def test_yarn_leaves_fast_pairs_interpolates_slow_ones_and_scales_all():
    n_dims, s = 64, 0.25
    (table,) = run(
        rope_table(places(100), n_dims=n_dims, freq_scale=s, ext_factor=1.0, n_ctx_orig=4096)
    )
    m = 1 + 0.1 * np.log(1 / s)
    theta = 100 * 10000.0 ** (-2 * np.arange(n_dims // 2) / n_dims)
    np.testing.assert_allclose(np.hypot(*table[0]), m, rtol=1e-6)
    np.testing.assert_allclose(table[0, 1, :5], m * np.sin(theta[:5]), atol=1e-5)
    np.testing.assert_allclose(table[0, 1, -8:], m * np.sin(s * theta[-8:]), atol=1e-6)


@pytest.mark.parametrize("mode", ["normal", "neox", "mrope"])
def test_an_offset_turns_the_features_behind_it_only(mode):
    x = floats(3, 2, 16)
    at = places(1, 2, 30)
    if mode == "mrope":
        at = leaf(np.tile(at.data, (4, 1)))
    several = {"sections": (2, 1, 1, 0)} if mode == "mrope" else {}
    whole, part = run(
        rope(leaf(x), at, mode=mode, n_dims=8, offset=6, **several),
        rope(leaf(x[..., 6:14]), at, mode=mode, n_dims=8, **several),
    )
    np.testing.assert_array_equal(whole[..., 6:14], part)
    np.testing.assert_array_equal(whole[..., :6], x[..., :6])
    np.testing.assert_array_equal(whole[..., 14:], x[..., 14:])


@pytest.mark.parametrize("mode, sections", [("mrope", (3, 3, 2, 0)), ("imrope", (3, 3, 2, 0))])
def test_text_has_four_equal_positions_and_turns_as_neox_does(mode, sections):
    x, at = leaf(floats(4, 2, 16)), places(0, 5, 6, 200)
    four = leaf(np.tile(at.data, (4, 1)))
    several, one = run(
        rope(x, four, mode=mode, n_dims=16, sections=sections),
        rope(x, at, mode="neox", n_dims=16),
    )
    np.testing.assert_array_equal(several, one)


def test_vision_turns_half_the_pairs_by_the_row_and_half_by_the_column():
    at = leaf(np.array([[7], [9], [0], [0]], np.int32))
    (table,) = run(rope_table(at, n_dims=8, mode="vision", sections=(4, 4, 4, 4)))
    fast = 10000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(table[0, 0], np.cos(np.concatenate([7 * fast, 9 * fast])), atol=1e-6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"n_dims": 7}, "n_dims is 7"),
        ({"n_dims": 0}, "n_dims is 0"),
        ({"n_dims": 8, "ext_factor": 1.0}, "YaRN needs n_ctx_orig > 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ShapeError, match=message):
        rope_table(places(0, 1), **settings)


def test_four_positions_need_four_sections():
    four = leaf(np.zeros((4, 2), np.int32))
    for sections in ((), (1, 2, 3), (0, 0, 0, 4), (4, -1, 2, 0)):
        with pytest.raises(ShapeError, match="sections .* wanted 4 numbers"):
            rope_table(four, n_dims=8, mode="mrope", sections=sections)
    with pytest.raises(ShapeError, match="wanted 4 rows for 'vision'"):
        rope_table(leaf(np.zeros((2, 2), np.int32)), n_dims=8, mode="vision", sections=(1, 1, 1, 1))
    with pytest.raises(ShapeError, match="freq_factors is .* wanted 8 or more"):
        rope_table(four, leaf(floats(4)), n_dims=8, mode="vision", sections=(4, 4, 0, 0))


def test_sources_that_do_not_fit_are_refused():
    x, at = leaf(floats(2, 3, 8)), places(0, 1)
    with pytest.raises(ShapeError, match="mode is 'glm'"):
        rope(x, at, mode="glm", n_dims=8)
    with pytest.raises(ShapeError, match=r"wanted \(2, 2, at most 4\) for .* from feature 0 on"):
        rope(x, at, mode="neox", n_dims=10)
    with pytest.raises(ShapeError, match=r"freq_factors is .* wanted 4 or more"):
        rope(x, at, leaf(floats(3)), mode="neox", n_dims=8)
    with pytest.raises(ShapeError, match=r"positions is .* wanted I32"):
        rope(x, leaf(floats(2)), mode="neox", n_dims=8)
