"""Bytes and values against ggml's own library, as llama-cpp-python ships it."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from pyggml.quants import QUANTS, dequantize, quantize

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


@pytest.fixture(scope="module")
def chunk():
    """ggml_quantize_chunk."""
    llama_cpp = pytest.importorskip("llama_cpp")
    library = next((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-base.*"))
    function = ctypes.CDLL(str(library)).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
    return function


@pytest.mark.parametrize("sort", list(SORTS))
@pytest.mark.parametrize("name", list(QUANTS))
def test_bytes_equal_ggmls(chunk, name, sort):
    d = QUANTS[name].dtype
    x = SORTS[sort](np.random.default_rng(d.number), (200, 1024)).astype(np.float32)
    wanted = np.zeros((len(x), d.row_bytes(x.shape[1])), np.uint8)
    n = chunk(d.number, x.ctypes.data, wanted.ctypes.data, 0, *x.shape, None)
    assert n == wanted.nbytes
    found = quantize(x, name)
    differ = (found.reshape(-1, d.block_bytes) != wanted.reshape(-1, d.block_bytes)).any(axis=1)
    # A C compiler may fuse a multiplication with an addition where this code must not.
    assert differ.mean() <= 1e-3
    error = [np.abs(dequantize(b, name) - x).mean() for b in (found, wanted)]
    assert error[0] == pytest.approx(error[1], rel=1e-4)
