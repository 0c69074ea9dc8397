"""Weights unpacked on the card equal the CPU's, bit for bit, whatever the bytes of the blocks."""

import numpy as np
import pytest
from packed_blocks import scaled_blocks

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.backends.cuda.weights.unpack import (
    Thin,
    is_placing,
    place_thin,
    placed_at_once,
    unpack,
    unpacked_beside,
)
from pyggml.graph import Graph
from pyggml.quants import QUANTS, dequantize
from pyggml.runtime import Devices, results

pytestmark = pytest.mark.filterwarnings("ignore:.*value encountered in:RuntimeWarning")


def blocks(name, n):
    """n blocks of random bytes, and their numbers."""
    raw = np.random.default_rng(7).integers(0, 256, n * QUANTS[name].dtype.block_bytes, np.uint8)
    return raw, dequantize(raw, name)


def on_the_card(raw, name, dtype, size):
    out = cuda.to_device(np.full(size, 7, dtype))
    unpack(out, cuda.to_device(raw), QUANTS[name].dtype, cuda.default_stream())()
    return out.copy_to_host()


@pytest.mark.parametrize("name", QUANTS)
def test_every_type_is_unpacked_as_on_the_cpu(name):
    raw, wanted = blocks(name, 2 if QUANTS[name].dtype.quantised else 70)
    found = on_the_card(raw, name, np.float32, wanted.size)
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(
        found.view(np.uint32)[is_number], wanted.view(np.uint32)[is_number]
    )
    assert np.isnan(found[~is_number]).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "IQ3_S", "F16"])
@pytest.mark.parametrize("below", [False, True])
def test_a_thin_matrix_is_placed_beside_weights(name, below):
    n, row, rank = 5, 512, 4
    raw, weights = blocks(name, n * row // QUANTS[name].dtype.block)
    raw, weights = raw[: n * QUANTS[name].dtype.row_bytes(row)], weights.ravel()[: n * row]
    thin = np.random.default_rng(2).standard_normal((rank, row) if below else (n, rank), np.float32)
    gap = 0 if below else 24
    out = cuda.to_device(np.full((n + 8) * (row + gap), 7, np.uint16))
    beside = Thin(n, rank, row, row + gap, n, gap, 8)
    place = Thin(rank, row, n * row, row, 8, row) if below else beside
    of = QUANTS[name].dtype, cuda.default_stream(), row, gap, cuda.to_device(thin.ravel()), place
    unpacked_beside(out, cuda.to_device(raw), *of)()
    found = (out.copy_to_host().astype(np.uint32) << 16).view(np.float32).reshape(n + 8, row + gap)
    is_number = np.isfinite(weights)
    np.testing.assert_allclose(found[:n, :row].ravel()[is_number], weights[is_number], rtol=0.005)
    wanted = np.zeros((8, row) if below else (n, gap), np.float32)
    (wanted[:rank] if below else wanted[:, 8 : 8 + rank])[...] = thin
    np.testing.assert_allclose(found[n:] if below else found[:n, row:], wanted, rtol=0.005)


def test_bfloat16_is_rounded_to_even():
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000, 0x7F7FFFFF], np.uint32)
    found = on_the_card(ties.view(np.uint8), "F32", np.uint16, ties.size)
    np.testing.assert_array_equal(found, [0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x7F80])


@pytest.mark.parametrize("name", ["Q5_1", "Q2_K", "Q6_K", "IQ1_M"])
def test_scales_change_and_have_slopes_as_on_the_host(name, card):
    nodes = scaled_blocks(name)
    on = [Devices([card, CPU()]), Devices([CPU()])]
    (changed, *slopes), (bytes_, *wanted) = (results(Graph.of(*nodes), d) for d in on)
    np.testing.assert_array_equal(changed, bytes_)
    for mine, theirs in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.skipif(SIMULATED, reason="an array of the simulator ends where it ends")
def test_thin_matrices_are_placed_at_once_as_one_by_one():
    """Each in an array of its own, from an array of its own, in any order of addresses."""
    rng, stream = np.random.default_rng(2), cuda.default_stream()
    kinds = [(32, 5, 40, 32, 24, 8), (8, 64, 0, 8, 64, 0), (3, 64, 128, 8, 64, 0)]
    thin = [cuda.to_device(rng.standard_normal(k[0] * k[1], np.float32)) for k in kinds]
    by_way = []
    for at_once in (False, True):
        outs = [cuda.to_device(np.full(5000, 7, np.uint16)) for _ in kinds]
        calls = [
            place_thin(out, source, Thin(rows, row, at, 128, *place), stream)
            for out, source, (rows, row, at, *place) in zip(outs, thin, kinds, strict=True)
        ]
        assert all(map(is_placing, calls))
        for call in [placed_at_once(calls, stream)] if at_once else calls:
            call()
        by_way.append([out.copy_to_host() for out in outs])
    for one, other in zip(*by_way, strict=True):
        np.testing.assert_array_equal(one, other)
        assert {7} < {*one}
