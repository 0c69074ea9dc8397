"""Bytes and values against ggml's own library, as llama-cpp-python ships it."""

import ctypes

import numpy as np
import pytest
from ggml_cpu import library

from pyggml.quants import QUANTS, NoPack, dequantize, quantize

from measures import misplaced_by_ggml

pytestmark = pytest.mark.interop

SORTS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(2, shape),
    "positive": lambda rng, shape: abs(rng.standard_normal(shape)),
    "uniform": lambda rng, shape: rng.random(shape),
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.05),
    "integers": lambda rng, shape: rng.integers(-3, 4, shape),
    "ties": lambda rng, shape: rng.integers(-254, 255, shape) / 2,
    "all magnitudes": lambda rng, shape: (
        rng.standard_normal(shape) * 10.0 ** rng.integers(-12, 4, shape)
    ),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-7,
    "hardly there": lambda rng, shape: rng.standard_normal(shape) * 2e-37,
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
}


PACKED = [n for n, q in QUANTS.items() if not isinstance(q.pack, NoPack)]


@pytest.fixture(scope="module")
def ggml():
    """The library that holds ggml's quantisation."""
    return library("ggml-base")


@pytest.fixture(scope="module")
def chunk(ggml):
    """ggml_quantize_chunk."""
    function = ggml.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
    return function


@pytest.mark.parametrize("sort", list(SORTS))
@pytest.mark.parametrize("name", PACKED)
def test_bytes_equal_ggmls(ggml, chunk, name, sort):
    d = QUANTS[name].dtype
    x = SORTS[sort](np.random.default_rng(d.number), (200, 1024)).astype(np.float32)
    x = np.clip(x, -QUANTS[name].limit, QUANTS[name].limit)
    wanted = np.zeros((len(x), d.row_bytes(x.shape[1])), np.uint8)
    if name == "Q8_1":  # of no tensor in a file, so the general function refuses it
        x_at, wanted_at = (ctypes.c_void_p(a.ctypes.data) for a in (x, wanted))
        ggml.quantize_row_q8_1_ref(x_at, wanted_at, ctypes.c_int64(x.size))
    else:
        n = chunk(d.number, x.ctypes.data, wanted.ctypes.data, 0, *x.shape, None)
        assert n == wanted.nbytes
    known = ~misplaced_by_ggml(name, x)
    x, found, wanted = (a.reshape(len(known), -1)[known] for a in (x, quantize(x, name), wanted))
    # A C compiler may fuse a multiplication with an addition where this code must not.
    assert (found != wanted).any(axis=1).mean() <= 1e-3
    error = [np.abs(dequantize(b, name) - x).mean() for b in (found, wanted)]
    assert error[0] == pytest.approx(error[1], rel=1e-4)


@pytest.mark.parametrize("name", [n for n in QUANTS if n not in ("F32", "F16", "BF16", "Q8_1")])
def test_values_equal_ggmls(ggml, name):
    d = QUANTS[name].dtype
    raw = np.random.default_rng(d.number).integers(0, 256, (2000, d.block_bytes), np.uint8)
    raw[0], raw[1] = 0, 255
    wanted = np.empty((len(raw), d.block), np.float32)
    function = getattr(ggml, f"dequantize_row_{name.lower().replace('_k', '_K')}")
    pointers = (ctypes.c_void_p(a.ctypes.data) for a in (raw, wanted))
    function(*pointers, ctypes.c_int64(wanted.size))
    found, nan = dequantize(raw, name), np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])
