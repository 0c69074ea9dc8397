"""Unpacking equals the `gguf` package's reference bit for bit, whatever the bytes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as reference

from pyggml._jit import JIT
from pyggml.quants import QUANTS, dequantize
from pyggml.quants.bits import float_to_half, half_to_float, nearest_int, truncate

# ±0, smallest and largest subnormal, smallest normal, largest, ±infinity, quiet and signalling NaN
HALVES = np.array(
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFC01],
    np.uint16,
)
# Wherever a type has its scales: at the start of a block, or at its end.
PLACES = (0, 2, -2)


def special_blocks(block_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks with every special half in every place where a scale may be."""
    blocks = rng.integers(0, 256, (len(PLACES) * len(HALVES), block_bytes), dtype=np.uint8)
    for i, place in enumerate(PLACES):
        if block_bytes >= 4:
            start = place % block_bytes
            rows = blocks[i * len(HALVES) : (i + 1) * len(HALVES)]
            rows[:, start : start + 2] = HALVES.view(np.uint8).reshape(-1, 2)
    return blocks


def some_blocks(name: str) -> np.ndarray:
    """(n_blocks, block_bytes): random, all zero, all one, and special scales."""
    d = QUANTS[name].dtype
    rng = np.random.default_rng(d.number)
    return np.concatenate(
        [
            rng.integers(0, 256, (100 if JIT else 4, d.block_bytes), dtype=np.uint8),
            np.zeros((1, d.block_bytes), np.uint8),
            np.full((1, d.block_bytes), 255, np.uint8),
            special_blocks(d.block_bytes, rng),
        ]
    )


def assert_same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", list(QUANTS))
def test_equals_reference(name):
    blocks = some_blocks(name)
    before = blocks.copy()
    found = dequantize(blocks, name)
    with np.errstate(all="ignore"):
        wanted = reference.dequantize(blocks, GGMLQuantizationType[name])
    assert found.dtype == np.float32
    assert_same_bits(found, wanted.astype(np.float32).reshape(found.shape))
    np.testing.assert_array_equal(blocks, before)


@pytest.mark.parametrize("name", list(QUANTS))
def test_block_code_writes_its_blocks_only(name):
    q = QUANTS[name]
    blocks = some_blocks(name)[:5]
    out = np.full(7 * q.dtype.block, 123.0, np.float32)
    with np.errstate(all="ignore"):
        q.unpack(out[q.dtype.block :], blocks, 5)
    wanted = dequantize(blocks, name).ravel()
    assert_same_bits(out[q.dtype.block : -q.dtype.block], wanted)
    assert (out[: q.dtype.block] == 123).all()
    assert (out[-q.dtype.block :] == 123).all()


@pytest.mark.skipif(not JIT, reason="an address exists for compiled code only")
@pytest.mark.parametrize("name", list(QUANTS))
def test_block_code_has_an_address(name):
    assert QUANTS[name].unpack.address > 0


def test_every_half():
    every = np.arange(65536).astype(np.uint16)
    halves = every if JIT else np.concatenate([HALVES, every[::97]])
    wanted = halves.view(np.float16).astype(np.float32)
    assert_same_bits(dequantize(halves.view(np.uint8), "F16"), wanted)


def test_half_to_float():
    found = np.array([half_to_float(h) for h in HALVES], np.float32)
    assert_same_bits(found, HALVES.view(np.float16).astype(np.float32))


# Values next to where rounding changes: between subnormals, at 2⁻¹⁴, at a tie, at overflow.
EDGES = np.array(
    [
        *(2.0**-24 * f for f in (0.25, 0.5, 0.75, 1, 1.5, 2.5)),
        *(0.0, 1e-45, 2.0**-14, 1.0, 2049.0, 2051.0, 65504.0, 65519.0, 65520.0, 1e30),
    ],
    np.float32,
)


def test_float_to_half():
    rng = np.random.default_rng(3)
    random = rng.integers(0, 2**32, 3000 if JIT else 100, dtype=np.uint32).view(np.float32)
    near = rng.standard_normal(500).astype(np.float32) * np.float32(2.0**-14)
    edges = np.concatenate([EDGES, np.nextafter(EDGES, np.float32(0))])
    for f in np.concatenate([random, near, edges, -edges]):
        with np.errstate(all="ignore"):
            wanted = f.astype(np.float16)
        found = np.array(float_to_half(f), np.uint16).view(np.float16)
        assert np.isnan(found) if np.isnan(wanted) else found.tobytes() == wanted.tobytes(), f


@pytest.mark.parametrize(
    "value, wanted",
    [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (2.4999, 2), (127.0, 127), (-4e6, -4e6)],
)
def test_nearest_int(value, wanted):
    assert nearest_int(np.float32(value)) == wanted


@pytest.mark.parametrize(
    "value, wanted", [(1.9, 1), (-1.9, -1), (np.inf, 0), (np.nan, 0), (1e9, 0)]
)
def test_truncate(value, wanted):
    assert truncate(np.float32(value)) == wanted


INTERPRETED = """
import sys
import numpy as np
from pyggml._jit import JIT
from pyggml.quants import QUANTS, dequantize, quantize
assert not JIT
x = np.load(sys.argv[1])["x"]
packed = {name: quantize(x, name) for name in QUANTS}
values = {"=" + name: dequantize(packed[name], name) for name in QUANTS}
special = {"!" + name: dequantize(b, name) for name, b in np.load(sys.argv[2]).items()}
np.savez(sys.argv[3], **packed, **values, **special)
"""


@pytest.mark.skipif(not JIT, reason="compares the interpreted code with the compiled")
def test_interpreted_code_gives_the_same_bits(tmp_path):
    from pyggml.quants import quantize

    x = np.random.default_rng(5).standard_t(3, (2, 256)).astype(np.float32)
    x[1, 100:] = 0
    blocks = {name: some_blocks(name)[-12:] for name in QUANTS}
    files = [tmp_path / name for name in ("x.npz", "blocks.npz", "out.npz")]
    np.savez(files[0], x=x)
    np.savez(files[1], **blocks)
    subprocess.run(
        [sys.executable, "-W", "error", "-c", INTERPRETED, *map(str, files)],
        check=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    out = np.load(files[2])
    for name in QUANTS:
        packed = quantize(x, name)
        np.testing.assert_array_equal(out[name], packed)
        assert_same_bits(out["=" + name], dequantize(packed, name))
        assert_same_bits(out["!" + name], dequantize(blocks[name], name))
