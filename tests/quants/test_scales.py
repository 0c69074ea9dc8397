"""The float16 scales of blocks: found in every decoder, changed, and the slopes along them."""

import numpy as np
import pytest

from pyggml.quants import QUANTS, dequantize, quant
from pyggml.quants.scales import rescale, scale_places, scale_sums, types_with_scales

WITHOUT = {"F32", "F16", "BF16", "MXFP4", "NVFP4"}  # floats, and scales that are no float16
PAIRS = {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"}  # a scale and a minimum


@pytest.fixture(params=types_with_scales())
def packed(request, rng, some_weight):
    """(type, blocks of 3 rows, room for their changes)."""
    n = 2 * quant(request.param).dtype.block
    raw = some_weight(rng, (3, n), request.param)
    return request.param, raw, np.zeros((3, 2, len(scale_places(request.param))), np.float32)


def test_every_type_has_its_scales():
    assert set(types_with_scales()) == QUANTS.keys() - WITHOUT
    assert {n for n in types_with_scales() if len(scale_places(n)) == 2} == PAIRS
    assert scale_places("Q6_K").tolist() == [[[208, 0], [208, 4], [209, 0], [209, 4]]]
    assert scale_places("IQ1_M").tolist() == [[[49, 4], [51, 4], [53, 4], [55, 4]]]


def test_no_change_keeps_every_byte(packed):
    name, raw, u = packed
    np.testing.assert_array_equal(rescale(raw, u, name), raw)


def test_scales_alone_change_and_are_rounded_once(packed):
    """All scales by 1.3: so every weight, but for the rounding of float16."""
    name, raw, u = packed
    changed = rescale(raw, u + np.float32(0.3), name)
    w, new = (dequantize(r, name).astype(np.float64) for r in (raw, changed))
    assert np.abs(new - 1.3 * w).max() <= 2**-10 * np.abs(w).max() * 1.5
    n_bytes = np.count_nonzero(np.any(changed != raw, axis=0))
    assert n_bytes <= 2 * 4 * u.shape[-1], "more than the bytes of scales"


def test_slopes_are_those_of_the_weights(packed, rng):
    """A scale that doubles, which float16 holds, adds its part of the weights once more."""
    name, raw, u = packed
    w = dequantize(raw, name).astype(np.float64)
    dw = rng.standard_normal(w.shape).astype(np.float32)
    sums = np.empty_like(u)
    scale_sums(raw, dw, name, sums)
    for k in range(u.shape[-1]):
        twice = u.copy()
        twice[..., k] = 1
        part = dequantize(rescale(raw, twice, name), name) - w
        wanted = (dw * part).reshape(3, 2, -1).sum(-1)
        size = np.abs(dw * part).reshape(3, 2, -1).sum(-1)
        assert (np.abs(sums[..., k] - wanted) <= 1e-5 * size + 1e-12).all()
