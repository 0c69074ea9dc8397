"""Decoders: the compiled code and the NumPy reference read the same from a block."""

import inspect
from pathlib import Path

import numpy as np
import pytest

import pyggml.jit
from pyggml.graph.dtypes import DTYPES
from pyggml.jit import JIT
from pyggml.jit.cache import SHARED
from pyggml.quants import UNPACK, dequantize
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.arrays import ArrayBlock, decode, observe
from pyggml.quants.unpack import LAYOUTS, MINIMA_TYPES

PACKAGE = Path(pyggml.jit.__file__).parents[1]
Q8_0, F16 = DTYPES["Q8_0"], DTYPES["F16"]


def random_blocks(name, n):
    d = DTYPES[name]
    return np.random.default_rng(d.number).integers(0, 256, (n, d.block_bytes), dtype=np.uint8)


def reference(name, raw):
    out = np.full((len(raw), DTYPES[name].block), np.nan, np.float32)
    decode(LAYOUTS[name], raw, out)
    return out


@pytest.mark.skipif(not JIT, reason="compares the compiled code with NumPy's")
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_code_equals_the_reference(name):
    raw = random_blocks(name, 2000)
    found, wanted = dequantize(raw, name), reference(name, raw)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", [name for name in LAYOUTS if DTYPES[name].block == 1])
@pytest.mark.parametrize("n", [1, SUBGROUP, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5])
def test_plain_types_have_rows_of_any_length(name, n):
    """Whole groups, then what is left of a row, and nothing behind it."""
    raw, out = random_blocks(name, n), np.full(n + GROUP, 123, np.float32)
    with np.errstate(all="ignore"):
        UNPACK[name](out, raw, n)
    np.testing.assert_array_equal(out[:n], reference(name, raw)[:, 0])
    assert (out[n:] == 123).all()


class Told(ArrayBlock):
    """Counts how often each weight is told."""

    def __init__(self, dtype):
        raw = np.random.default_rng(3).integers(0, 256, (1, dtype.block_bytes), dtype=np.uint8)
        super().__init__(raw, np.zeros((1, dtype.block), np.float32))
        self.times_told = np.zeros(dtype.block, int)

    def add(self, scale, q, i=0):
        assert scale.shape == (1, 1)
        assert q.shape == (1, GROUP)
        self.times_told[i : i + GROUP] += 1

    def add_two(self, scales, q, i, most):
        assert (abs(np.ascontiguousarray(q).view(np.int8).astype(int)) <= most).all()
        for scale in scales:
            self.add(scale, q, i)
        self.times_told[i : i + GROUP] -= 1

    def add_floats(self, floats, i):
        self.times_told[i : i + floats.shape[1]] += 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_weight_is_told_once(name):
    told = Told(DTYPES[name])
    LAYOUTS[name](told)
    np.testing.assert_array_equal(told.times_told, 1)


def test_types_with_a_minimum_are_ggmls():
    """Those with an `m` or a `dmin` in ggml-common.h."""
    assert {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"} == MINIMA_TYPES


def test_facts_are_what_a_decoder_tells():
    def with_minimum(block):
        block.add_minimum(block.f16(0))
        block.add(block.f16(0), block.bytes(2))

    def plain(block):
        block.add_floats(block.f16(0), 0)

    pairs = (with_minimum, Q8_0), (LAYOUTS["Q8_0"], Q8_0), (plain, F16)
    found = [(block.minima is not None, block.is_plain) for block in (observe(*p) for p in pairs)]
    assert found == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize(
    "read",
    [
        lambda block: block.bytes(3),
        lambda block: block.nibbles(19),
        lambda block: block.flags(31, 16),
        lambda block: block.fields(31, 4, 4),
        lambda block: block.f16(33),
        lambda block: block.bf16(2, 17),
        lambda block: block.f32(31),
        lambda block: block.half_e8m0(34),
    ],
)
def test_a_decoder_that_reads_beyond_its_block_is_refused(read):
    with pytest.raises(IndexError, match=r"reads bytes \d+ to 3[4-5] of a block of 34"):
        observe(read, Q8_0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_kernel_cache_watches_every_decoder(name):
    source = Path(inspect.getsourcefile(LAYOUTS[name])).relative_to(PACKAGE).as_posix()
    assert source in SHARED, f"{source} has decoders and is not in SHARED"
