"""The float32 functions of vectors keep the errors that they state, in units of the last place."""

import math

import numpy as np
import pytest

from pyggml.jit import kernel, simd

pytestmark = pytest.mark.quick


@kernel
def every(x, exps, wholes, expm1s, sigmoids, softpluses, erfcs):
    for i in range(x.size):
        exps[i] = simd.exp32(x[i])
        wholes[i] = simd.whole_exp32(x[i])
        expm1s[i] = simd.expm1_32(x[i])
        sigmoids[i] = simd.sigmoid32(x[i])
        softpluses[i] = simd.softplus32(x[i])
        erfcs[i] = simd.erfc32(x[i])


def results(x):
    found = np.empty((6, x.size), np.float32)
    every(x, *found)
    return dict(zip(("exp", "whole", "expm1", "sigmoid", "softplus", "erfc"), found, strict=True))


def exact(x):
    e = np.exp(x)
    return {
        "exp": e,
        "whole": e,
        "expm1": np.expm1(x),
        "sigmoid": 1 / (1 + np.exp(-x)),
        "softplus": np.logaddexp(0, x),
        "erfc": np.array([math.erfc(v) for v in x]),
    }


STATED = {"exp": 5, "whole": 6, "expm1": 5, "sigmoid": 6, "softplus": 5, "erfc": 7}


@pytest.mark.parametrize("reach", [0.01, 1, 8, 87])
def test_errors_are_as_stated(reach):
    x = np.random.default_rng(0).uniform(-reach, reach, 4000).astype(np.float32)
    found, wanted = results(x), exact(x.astype(float))
    for name, most in STATED.items():
        is_normal = np.abs(wanted[name]) > 1e-37
        unit = np.spacing(np.abs(wanted[name]).astype(np.float32)).astype(float)
        error = (np.abs(found[name] - wanted[name]) / unit)[is_normal].max()
        assert error <= most, f"{name}: {error}"


def test_the_ends():
    x = np.array([np.nan, np.inf, -np.inf, 88.7, -100, -0.0], np.float32)
    found = results(x)
    assert all(np.isnan(y[0]) for y in found.values())
    ends = {"exp": (np.inf, 0), "whole": (np.inf, 0), "expm1": (np.inf, -1)}
    ends |= {"sigmoid": (1, 0), "softplus": (np.inf, 0), "erfc": (0, 2)}
    for name, (above, below) in ends.items():
        assert found[name][1] == above and found[name][2] == below and found[name][4] == below, name
    np.testing.assert_allclose(found["whole"][3], np.exp(np.float64(x[3])), rtol=1e-6)
    np.testing.assert_allclose(found["expm1"][3], np.exp(np.float64(x[3])), rtol=1e-6)
    assert found["expm1"][5] == 0
