"""Whole tensors: shapes, layouts, threads, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml import threads
from pyggml.errors import QuantError
from pyggml.graph.dtypes import DTYPES
from pyggml.jit import JIT
from pyggml.quants import QUANTS, NoPack, dequantize, quant, quantize, registry

NAMES = [n for n, q in QUANTS.items() if not isinstance(q.pack, NoPack)]
CHEAP = [n for n in NAMES if QUANTS[n].dtype.block <= 32]  # packed fast, even when interpreted
NUMBERS = [("F64", np.float64), *((f"I{8 * s}", np.dtype(f"i{s}").type) for s in (1, 2, 4, 8))]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_declarations_are_keyed_by_their_name():
    assert all(q.dtype is DTYPES[name] for name, q in QUANTS.items())
    assert quant("q4_k") is QUANTS["Q4_K"]


@settings(max_examples=40 if JIT else 5)
@given(
    name=st.sampled_from(CHEAP),
    outer=st.lists(st.integers(0, 3), max_size=3),
    n_blocks=st.integers(0, 3),
)
def test_shapes(name, outer, n_blocks):
    d = QUANTS[name].dtype
    n = n_blocks * 32
    x = normal(*outer, n)
    raw = quantize(x, name)
    assert raw.dtype == np.uint8
    assert raw.shape == (*outer, d.row_bytes(n))
    values = dequantize(raw, name)
    assert values.dtype == np.float32
    assert values.shape == x.shape
    for index in np.ndindex(*outer):
        np.testing.assert_array_equal(raw[index], quantize(x[index], name))
        np.testing.assert_array_equal(values[index], dequantize(raw[index], name))


@settings(max_examples=20 if JIT else 3)
@given(name=st.sampled_from(CHEAP), axes=st.permutations(range(3)), step=st.integers(1, 3))
def test_strided_input(name, axes, step):
    x = normal(32, 32, 64).transpose(axes)[::16, ::-1, :][:, ::step][:, :2]
    x = x[..., : x.shape[-1] // 32 * 32]
    np.testing.assert_array_equal(quantize(x, name), quantize(x.copy(), name))
    raw = quantize(x, name)
    spread = np.zeros((*raw.shape[:-1], 2 * raw.shape[-1]), np.uint8)[..., ::2]
    spread[:] = raw
    np.testing.assert_array_equal(dequantize(spread, name), dequantize(raw, name))


@pytest.mark.parametrize("name", NAMES)
def test_read_only_input(name):
    x = normal(1, 256)
    x.flags.writeable = False
    raw = quantize(x, name)
    raw.flags.writeable = False
    assert dequantize(raw, name).flags.writeable


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_floats_go_through_float32(kind):
    x = normal(2, 64).astype(kind)
    np.testing.assert_array_equal(quantize(x, "Q8_0"), quantize(x.astype(np.float32), "Q8_0"))


@pytest.mark.parametrize("name, kind", [("F32", np.float32), ("F16", np.float16)])
def test_native_arrays_of_plain_types(name, kind):
    x = normal(3, 5).astype(kind)
    np.testing.assert_array_equal(dequantize(x, name), x.astype(np.float32))
    np.testing.assert_array_equal(dequantize(x.view(np.uint8), name), x.astype(np.float32))


def test_native_bf16_is_uint16():
    bits = quantize(normal(3, 5), "BF16").view(np.uint16)
    np.testing.assert_array_equal(dequantize(bits, "BF16"), dequantize(bits.view(np.uint8), "BF16"))


@pytest.mark.skipif(not JIT, reason="interpreted code runs on one thread")
@pytest.mark.parametrize("name", ["F16", "Q8_0"])
def test_threads_give_the_same(name):
    x = normal(9, 65536 + 32)  # three pieces of work, the last one short
    n = threads.get()
    try:
        threads.set(1)
        raw = quantize(x, name)
        values = dequantize(raw, name)
        threads.set(2)
        np.testing.assert_array_equal(quantize(x, name), raw)
        np.testing.assert_array_equal(dequantize(raw, name), values)
    finally:
        threads.set(n)


@pytest.mark.parametrize("call", [dequantize, quantize])
def test_unknown_types_are_refused(call):
    with pytest.raises(QuantError, match=r"Q9_9.* not a tensor type; known are F32"):
        call(normal(1, 32), "Q9_9")
    with pytest.raises(QuantError, match="Q8_K is not for tensors in files; weight types are F32"):
        call(normal(1, 32), "Q8_K")


@pytest.mark.parametrize("name, kind", NUMBERS)
def test_numbers_are_read_as_the_nearest_float32(name, kind):
    x = np.array([[0, 1, -100, 127], [5, -128, 99, 3]], kind)
    wanted = x.astype(np.float32)
    for found in (dequantize(x, name), dequantize(x.view(np.uint8), name)):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(dequantize(x[::-1, ::2], name), wanted[::-1, ::2])


@pytest.mark.parametrize("name, kind", NUMBERS)
def test_numbers_are_no_weights(name, kind):
    with pytest.raises(
        QuantError, match=f"{name} holds numbers, not weights; weight types are F32"
    ):
        quantize(normal(1, 4), name)
    with pytest.raises(QuantError, match=f"{name} data must be uint8 or {np.dtype(kind)}"):
        dequantize(np.zeros((2, 4), np.float16), name)


@pytest.mark.parametrize("name", [n for n in QUANTS if n not in NAMES])
def test_types_that_are_packed_by_importance_alone(name):
    with pytest.raises(QuantError, match=f"{name} cannot be written: its points are chosen by the"):
        quantize(normal(1, 256), name)


@pytest.mark.parametrize(
    "raw, name, message",
    [
        (np.zeros((2, 35), np.uint8), "Q8_0", "rows of 35 bytes .* Q8_0's 34-byte blocks"),
        (np.zeros((2, 3), np.uint8), "F16", "rows of 3 bytes .* F16's 2-byte blocks"),
        (np.zeros((2, 34), np.int8), "Q8_0", "Q8_0 data must be uint8 .* found int8"),
        (np.zeros((2, 34), np.float32), "F16", "must be uint8 or float16 .* found float32"),
        (np.zeros((2, 34), ">f2"), "F16", "must be uint8 or float16 .* found >f2"),
        (np.array(3, np.uint8), "Q8_0", r"at least one axis; found uint8 with shape \(\)"),
    ],
)
def test_misfit_bytes_are_refused(raw, name, message):
    with pytest.raises(QuantError, match=message):
        dequantize(raw, name)


@pytest.mark.parametrize(
    "x, name, message",
    [
        (normal(2, 48), "Q8_0", "48 elements is not a multiple of Q8_0's 32"),
        (normal(2, 32), "Q4_K", "32 elements is not a multiple of Q4_K's 256"),
        (np.zeros((2, 32), np.int32), "Q8_0", "wants an array of floats .* found int32"),
        (np.float32(1) * np.ones(()), "Q8_0", r"at least one axis; found .* with shape \(\)"),
    ],
)
def test_misfit_arrays_are_refused(x, name, message):
    with pytest.raises(QuantError, match=message):
        quantize(np.asarray(x), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name, value):
    x = np.zeros((2, 3, 256), np.float32)
    x[1, 2, 7] = value
    with pytest.raises(QuantError, match=rf"finite .* {name}; found {value} at \(1, 2, 7\)"):
        quantize(x, name)


@pytest.mark.skipif(not JIT, reason="large")
def test_position_of_a_bad_value_in_a_later_piece():
    x = np.zeros((5, 1 << 17), np.float32)
    x[4, 1000] = np.nan
    with pytest.raises(QuantError, match=r"found nan at \(4, 1000\)"):
        quantize(x, "Q8_0")


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("F32", "MXFP4")])
def test_values_beyond_the_range_of_a_type_are_refused(name):
    x = np.zeros((1, 256), np.float32)
    x[0, 3] = np.finfo(np.float32).max
    with pytest.raises(QuantError, match=f"3.403e.38 .* too large for {name}"):
        quantize(x, name)


# The coarsest: no point of their grids has one large number among small ones.
COARSE = {"MXFP4": 0.25, "IQ3_XXS": 0.4, "IQ3_S": 0.25, "IQ2_S": 0.2}


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("Q1_0", "NVFP4", "IQ1_M")])
def test_large_values_that_fit(name):
    x = np.zeros((1, 256), np.float32)
    x[0, 3] = 65000
    found = dequantize(quantize(x, name), name)
    np.testing.assert_allclose(found, x, atol=COARSE.get(name, 0.03) * 65000)


def test_mxfp4_holds_every_float():
    x = np.full((1, 32), np.finfo(np.float32).max)
    np.testing.assert_allclose(dequantize(quantize(x, "MXFP4"), "MXFP4"), x, rtol=0.26)


def test_nvfp4_is_small():
    """Its largest scale is 448, the largest level 6; larger weights would be cut off."""
    x = np.full((1, 64), 448 * 6, np.float32)
    np.testing.assert_array_equal(dequantize(quantize(x, "NVFP4"), "NVFP4"), x)
    with pytest.raises(QuantError, match="values up to 5400 .* too large for NVFP4"):
        quantize(np.full((1, 64), 5400, np.float32), "NVFP4")


def test_one_bit_takes_the_mean():
    x = np.zeros((1, 128), np.float32)
    x[0, 3] = 65000
    found = dequantize(quantize(x, "Q1_0"), "Q1_0")
    np.testing.assert_allclose(found, 65000 / 128, rtol=1e-3)


def test_a_type_that_cannot_be_written_says_why(monkeypatch):
    read_only = replace(QUANTS["Q8_0"], pack=NoPack("it is for reading"))
    monkeypatch.setitem(registry.QUANTS, "Q8_0", read_only)
    with pytest.raises(QuantError, match="Q8_0 cannot be written: it is for reading"):
        quantize(normal(1, 32), "Q8_0")
