"""What ggml's ops take beside F32 and whole parts: halves, odd widths, other whole numbers."""

import numpy as np
import pytest

from pyggml import ops
from pyggml.errors import ShapeError
from pyggml.graph.dtypes import BF16, F16, F32
from pyggml.graph.tensor import leaf
from pyggml.look.check import check_gradient
from pyggml.runtime import run

pytestmark = pytest.mark.quick


def some(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("swapped", [False, True])
def test_of_an_odd_width_a_gated_unit_drops_the_last_column(swapped):
    x = some(3, 7)
    found, wanted = run(
        ops.swiglu(leaf(x), swapped=swapped), ops.swiglu(leaf(x[:, :6]), swapped=swapped)
    )
    np.testing.assert_array_equal(found, wanted)
    (slope,) = check_gradient(
        lambda x: ops.swiglu(x, swapped=swapped), [x], np.random.default_rng(0)
    )
    assert slope.error < 1e-5


def test_halves_with_gaps():
    x = leaf(some(4, 3, 8).astype(np.float16))
    turned = ops.permute(x, (1, 0, 2))
    found, wanted = run(ops.silu(turned), ops.cpy(ops.silu(ops.cpy(turned, F32)), F16))
    np.testing.assert_array_equal(found, wanted)


def test_a_sum_over_f16_takes_no_place_of_f16():
    """Nothing is computed in place in a type that a kernel does not have."""
    with pytest.raises(ShapeError, match="add_inplace"):
        ops.add_inplace(leaf(some(3).astype(np.float16)), leaf(some(3)))


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
def test_a_mask_of_half_width(kind):
    mask = ops.cpy(leaf(np.where(np.tri(5, 7), 0, -np.inf).astype(np.float32)), kind)
    x = leaf(some(2, 5, 7))
    found, wanted = run(ops.soft_max(x, mask), ops.soft_max(x, ops.cpy(mask, F32)))
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.float32


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
def test_gradients_of_half_width_are_added_up_as_f32(kind):
    ids, dy = leaf(np.int32([1, 1, 0])), ops.cpy(leaf(some(3, 4)), kind)
    found, wanted = run(ops.get_rows_back(dy, ids, 5), ops.get_rows_back(ops.cpy(dy, F32), ids, 5))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        lambda w: ops.conv_2d(w, leaf(some(2, 3, 6, 7))),
        lambda w: ops.conv_2d_direct(w, leaf(some(2, 3, 6, 7))),
        lambda w: ops.conv_transpose_2d(w, leaf(some(2, 4, 5, 5))),
        lambda w: ops.conv_2d_direct(leaf(some(2, 3, 2, 2)), w),
        lambda w: ops.im2col(w, (2, 2)),
    ],
)
def test_convolutions_of_half_width(build, kind):
    w = ops.cpy(leaf(some(4, 3, 3, 2)), kind)
    found, wanted = run(build(w), build(ops.cpy(w, F32)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 0), (3, 1)])
def test_columns_of_a_transposed_convolution(stride, padding):
    """conv_transpose_1d is a product, then col2im_1d."""
    w, x = some(3, 4, 5), some(3, 6, seed=1)  # (IC, OC, K) and (IC, T)
    cols = ops.mul_mat(leaf(w.reshape(3, 20).T.copy()), leaf(x.T.copy()))
    found, wanted = run(
        ops.col2im_1d(cols, 4, stride, padding),
        ops.conv_transpose_1d(leaf(w), leaf(x[None]), stride),
    )
    inside = slice(padding, wanted.shape[-1] - padding)
    np.testing.assert_allclose(found, wanted[0, :, inside], rtol=0, atol=1e-5)
    with pytest.raises(ShapeError, match="3 channels"):
        ops.col2im_1d(cols, 3)


def test_an_antialiased_half_is_a_mean_of_four():
    """Triangles of width 4: 1, 3, 3, 1 eighths; at the ends 3, 3, 1 sevenths."""
    x = some(1, 8)
    (found,) = run(ops.upscale(leaf(x), (1, 4), "bilinear", antialias=True))
    inner = np.convolve(x[0], [1 / 8, 3 / 8, 3 / 8, 1 / 8], "valid")[1::2]
    ends = x[0, :3] @ np.float32([3, 3, 1]) / 7, x[0, -3:] @ np.float32([1, 3, 3]) / 7
    np.testing.assert_allclose(found[0], [ends[0], *inner, ends[1]], rtol=0, atol=1e-6)


def test_antialiasing_changes_nothing_where_an_axis_grows():
    x = leaf(some(3, 4))
    found, wanted = run(
        ops.upscale(x, (6, 9), "bilinear", antialias=True), ops.upscale(x, (6, 9), "bilinear")
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"mode": "bicubic"}, {"mode": "bilinear", "align_corners": 1}]
)
def test_antialiasing_is_of_bilinear_alone(settings):
    with pytest.raises(ShapeError, match="antialias"):
        ops.upscale(leaf(some(3, 4)), (6, 9), antialias=True, **settings)
