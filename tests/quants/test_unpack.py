"""Unpacking equals the `gguf` package's reference bit for bit, whatever the bytes."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as reference
from processes import printed

from pyggml.jit import JIT
from pyggml.quants import QUANTS, UNPACK, NoPack, dequantize, quantize
from pyggml.quants.bits import f16_to_float, float_to_f16, nearest_int, truncate

# ±0, smallest and largest subnormal, smallest normal, largest, ±infinity, quiet and signalling NaN
F16_BITS = np.array(
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFC01],
    np.uint16,
)
# Wherever a type has its scales: at the start of a block, or at its end.
PLACES = (0, 2, -4, -2)


# What the package lacks, from the layouts in ggml-common.h.
def _q8_1(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, :2].view(np.float16).astype(np.float32) * blocks[:, 4:].view(np.int8)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    d = blocks[:, :2].view(np.float16).astype(np.float32)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), d, -d)


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), 64, 2)
    q = bits[..., 0].astype(np.float32) + 2 * bits[..., 1] - 1
    return q * blocks[:, :2].view(np.float16).astype(np.float32)


OWN = {"Q8_1": _q8_1, "Q1_0": _q1_0, "Q2_0": _q2_0}


def reference_values(name: str, blocks: np.ndarray) -> np.ndarray:
    """float32, of any shape, in the order of the weights."""
    with np.errstate(all="ignore"):
        if name in OWN:
            return OWN[name](blocks)
        return reference.dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32)


def special_blocks(block_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks with every special half in every place where a scale may be."""
    blocks = rng.integers(0, 256, (len(PLACES) * len(F16_BITS), block_bytes), dtype=np.uint8)
    for i, place in enumerate(PLACES):
        if block_bytes >= 4:
            start = place % block_bytes
            rows = blocks[i * len(F16_BITS) : (i + 1) * len(F16_BITS)]
            rows[:, start : start + 2] = F16_BITS.view(np.uint8).reshape(-1, 2)
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


@pytest.mark.quick
@pytest.mark.parametrize("name", list(QUANTS))
def test_equals_reference(name):
    blocks = some_blocks(name)
    before = blocks.copy()
    found = dequantize(blocks, name)
    assert found.dtype == np.float32
    assert_same_bits(found, reference_values(name, blocks).reshape(found.shape))
    np.testing.assert_array_equal(blocks, before)


@pytest.mark.parametrize("name", [n for n in QUANTS if QUANTS[n].dtype.quantised])
def test_every_byte_in_every_place(name):
    """Every index of a grid's low bits, every scale, every pair of levels."""
    places = QUANTS[name].dtype.block_bytes
    rng = np.random.default_rng(1)
    blocks = np.arange(256, dtype=np.uint8)[:, None] + rng.integers(0, 256, places, dtype=np.uint8)
    blocks = blocks if JIT else blocks[::40]
    found = dequantize(blocks, name)
    assert_same_bits(found, reference_values(name, blocks).reshape(found.shape))


def test_every_point_of_the_grids():
    """All 2048 points of IQ1_S, which has the most: 64 blocks with indices in order."""
    index = np.arange(2048).reshape(64, 8, 4)
    top = (index >> 8 << np.array([0, 3, 6, 9])).sum(axis=-1).astype("<u2")
    parts = [np.full((64, 1), np.float16(2)), index.astype(np.uint8), top]
    blocks = np.concatenate([p.reshape(64, -1).view(np.uint8) for p in parts], axis=1)
    found = dequantize(blocks, "IQ1_S")
    assert_same_bits(found, reference_values("IQ1_S", blocks))
    assert len(np.unique(found.reshape(-1, 8), axis=0)) == 2048


SCALES_OF_IQ1_M = [0x0000, 0x8001, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00]


@pytest.mark.parametrize("half", SCALES_OF_IQ1_M)
def test_the_scattered_scale_of_iq1_m(half):
    blocks = some_blocks("IQ1_M")
    for i in range(4):
        blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 15) | ((half >> (4 * i) & 15) << 4)
    found = dequantize(blocks, "IQ1_M")
    assert_same_bits(found, reference_values("IQ1_M", blocks))


def test_grids_are_read_when_they_are_needed():
    """By the interpreted code: compiled code of an earlier process has the grid in it."""
    script = (
        "import sys, numpy as np; from pyggml.quants import dequantize;"
        "dequantize(np.zeros((1, 144), np.uint8), 'Q4_K'); assert 'gguf' not in sys.modules;"
        "dequantize(np.zeros((1, 50), np.uint8), 'IQ1_S');"
        "assert 'gguf' in sys.modules or sys.argv[1] == 'compiled'"
    )
    for code, disabled in (("compiled", "0"), ("interpreted", "1")):
        printed(script, code, NUMBA_DISABLE_JIT=disabled)


@pytest.mark.parametrize("name", list(QUANTS))
def test_block_code_writes_its_blocks_only(name):
    q = QUANTS[name]
    blocks = some_blocks(name)[:5]
    out = np.full(7 * q.dtype.block, 123.0, np.float32)
    with np.errstate(all="ignore"):
        UNPACK[name](out[q.dtype.block :], blocks, 5)
    wanted = dequantize(blocks, name).ravel()
    assert_same_bits(out[q.dtype.block : -q.dtype.block], wanted)
    assert (out[: q.dtype.block] == 123).all()
    assert (out[-q.dtype.block :] == 123).all()


@pytest.mark.skipif(not JIT, reason="an address exists for compiled code only")
@pytest.mark.parametrize("name", list(QUANTS))
def test_block_code_has_an_address(name):
    assert UNPACK[name].address > 0


def test_every_f16():
    every = np.arange(65536).astype(np.uint16)
    bits = every if JIT else np.concatenate([F16_BITS, every[::97]])
    wanted = bits.view(np.float16).astype(np.float32)
    assert_same_bits(dequantize(bits.view(np.uint8), "F16"), wanted)


def test_f16_to_float():
    found = np.array([f16_to_float(h) for h in F16_BITS], np.float32)
    assert_same_bits(found, F16_BITS.view(np.float16).astype(np.float32))


# Values next to where rounding changes: between subnormals, at 2⁻¹⁴, at a tie, at overflow.
EDGES = np.array(
    [
        *(2.0**-24 * f for f in (0.25, 0.5, 0.75, 1, 1.5, 2.5)),
        *(0.0, 1e-45, 2.0**-14, 1.0, 2049.0, 2051.0, 65504.0, 65519.0, 65520.0, 1e30),
    ],
    np.float32,
)


def test_float_to_f16():
    rng = np.random.default_rng(3)
    random = rng.integers(0, 2**32, 3000 if JIT else 100, dtype=np.uint32).view(np.float32)
    near = rng.standard_normal(500).astype(np.float32) * np.float32(2.0**-14)
    edges = np.concatenate([EDGES, np.nextafter(EDGES, np.float32(0))])
    for f in np.concatenate([random, near, edges, -edges]):
        with np.errstate(all="ignore"):
            wanted = f.astype(np.float16)
        found = np.array(float_to_f16(f), np.uint16).view(np.float16)
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
from pyggml.jit import JIT
from pyggml.quants import QUANTS, UNPACK, NoPack, dequantize, quantize
assert not JIT
x = np.load(sys.argv[1])["x"]
packed = {n: quantize(x, n) for n, q in QUANTS.items() if not isinstance(q.pack, NoPack)}
values = {"=" + name: dequantize(packed[name], name) for name in packed}
special = {"!" + name: dequantize(b, name) for name, b in np.load(sys.argv[2]).items()}
np.savez(sys.argv[3], **packed, **values, **special)
"""


@pytest.mark.skipif(not JIT, reason="compares the interpreted code with the compiled")
def test_interpreted_code_gives_the_same_bits(tmp_path):
    x = np.random.default_rng(5).standard_t(3, (2, 256)).astype(np.float32)
    x[1, 100:] = 0
    blocks = {name: some_blocks(name)[-12:] for name in QUANTS}
    files = [tmp_path / name for name in ("x.npz", "blocks.npz", "out.npz")]
    np.savez(files[0], x=x)
    np.savez(files[1], **blocks)
    printed(INTERPRETED, *files, NUMBA_DISABLE_JIT="1", PYTHONWARNINGS="error")
    out = np.load(files[2])
    for name, q in QUANTS.items():
        assert_same_bits(out["!" + name], dequantize(blocks[name], name))
        if not isinstance(q.pack, NoPack):
            packed = quantize(x, name)
            np.testing.assert_array_equal(out[name], packed)
            assert_same_bits(out["=" + name], dequantize(packed, name))
