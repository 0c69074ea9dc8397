"""What the registry's tests cannot say of norms: fused equals unfused, and rows of zeros."""

import numpy as np
import pytest
from normals import floats

from pyggml.errors import ShapeError
from pyggml.graph.tensor import leaf
from pyggml.ops.norm.norm import l2_norm, l2_norm_back, norm, rms_norm
from pyggml.ops.norm.norm_mul import rms_norm_mul
from pyggml.runtime import run


def test_rows_of_zeros_stay_finite():
    zero, dy = leaf(np.zeros((2, 5), np.float32)), leaf(floats(2, 5))
    for y in run(rms_norm(zero), norm(zero), l2_norm(zero)):
        np.testing.assert_array_equal(y, 0)
    (dx,) = run(l2_norm_back(zero, dy, eps=0.5))
    np.testing.assert_allclose(dx, dy.data / 0.5, rtol=1e-6)


def test_norm_is_right_far_from_zero():
    """The variance of what is left after the mean: E[x²] − E[x]² would lose all digits here."""
    x = 1000 + floats(3, 257)
    (y,) = run(norm(leaf(x)))
    x64 = x.astype(np.float64)
    want = (x64 - x64.mean(-1, keepdims=True)) / x64.std(-1, keepdims=True)
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n", [64, 66])
def test_a_weight_of_the_wrong_length_is_refused_by_name(n):
    w = leaf(np.ones(n, np.float32), "attn_norm.weight")
    with pytest.raises(ShapeError, match=r"rms_norm_mul: w is <attn_norm\.weight .* F32\[65\]"):
        rms_norm_mul(leaf(floats(4, 65)), w)
