"""Packing that keeps an update: all of it is written along itself, whatever the type, its scales
and its importance; nothing else moves."""

import numpy as np
import pytest
from cases import cases

from pyggml import threads
from pyggml.errors import QuantError
from pyggml.quants import QUANTS, dequantize, quantize
from pyggml.quants.base import NoPack
from pyggml.quants.keep import quantize_update
from pyggml.quants.packers.levels import levels_of

N = 512


def drawn(name, times, rows=96, seed=0):
    """Blocks of a type, their numbers, and the same with an update of rank 4, `times` 1e-3 in size
    where the weights are 1."""
    rng = np.random.default_rng(seed)
    own = quantize(rng.standard_normal((rows, N)).astype(np.float32), name)
    before = dequantize(own, name)
    update = rng.standard_normal((rows, 4)) @ rng.standard_normal((4, N))
    return own, before, (before + 5e-4 * times * update).astype(np.float32)


def share(raw, name, before, after, weights=1.0):
    update = (after - before).astype(np.float64)
    written = dequantize(raw, name) - before
    return np.sum(weights * written * update) / np.sum(weights * update**2)


def has_choice(name):
    """Whether each weight of this type may be changed alone, by what its blocks are: they are
    written without importance, hold nothing but weights, and are no floats or points of grids."""
    q = QUANTS[name]
    is_free = q.dtype.block > 1 and not isinstance(q.pack, NoPack) and name != "Q8_1"
    return is_free and not name.startswith(("IQ1", "IQ2", "IQ3"))


LEVELS = [name for name in QUANTS if has_choice(name)]


@pytest.mark.parametrize("name", QUANTS)
def test_every_type_has_levels_where_the_decoder_reads_them_or_none(name):
    rng, d, levels = np.random.default_rng(1), QUANTS[name].dtype, levels_of(name)
    assert (levels is not None) == has_choice(name)
    if levels is None:
        return
    n = 64
    blocks = quantize(rng.standard_normal(n * d.block).astype(np.float32), name)
    blocks = blocks.reshape(n, d.block_bytes)
    offset, step = levels.grid(blocks)
    q = rng.integers(0, len(levels.values), offset.shape).astype(np.uint8)
    levels.put(blocks, q)
    numbers = dequantize(blocks.reshape(-1), name).reshape(offset.shape)
    np.testing.assert_array_equal(numbers, offset + step * levels.values[q])


# −128, −0 and fields beyond three digits are not written; all other patterns of a level's bits are.
N_LEVELS = {"Q8_0": 255, "MXFP4": 15, "NVFP4": 15, "Q2_0": 3, "TQ1_0": 3, "TQ2_0": 3, "Q1_0": 2}
N_LEVELS |= {f"Q{n}_{kind}": 1 << n for n in (4, 5) for kind in "01K"}
N_LEVELS |= {"Q2_K": 4, "Q3_K": 8, "Q6_K": 64, "IQ4_NL": 16, "IQ4_XS": 16}


@pytest.mark.parametrize("name", N_LEVELS)
def test_levels_are_those_that_a_packer_writes(name):
    values = levels_of(name).values
    assert len(values) == N_LEVELS[name]
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize("name", cases(LEVELS, ["Q4_K", "IQ4_NL"]))
@pytest.mark.parametrize("times", [1, 30])
def test_all_of_an_update_is_written(name, times):
    own, before, after = drawn(name, times)
    # What the last row owes is left: of two or three levels one step is a tenth of a small update.
    most = 0.1 if times == 1 and len(levels_of(name).values) < 4 else 0.03
    for theirs in (own, None):
        raw = quantize_update(after, before, name, own=theirs)
        assert abs(share(raw, name, before, after) - 1) < most
    if times == 1 and name != "Q8_0":
        plain = share(quantize(after, name), name, before, after)
        assert abs(plain - 1) > 0.4  # or nothing is shown


def test_columns_that_matter_count_as_much_more():
    own, before, after = drawn("Q4_K", 1)
    importance = np.random.default_rng(2).uniform(0, 4, N).astype(np.float32) ** 4
    raw = quantize_update(after, before, "Q4_K", importance, own)
    assert 0.97 < share(raw, "Q4_K", before, after, importance) < 1.03


def test_a_row_without_an_update_keeps_its_bytes():
    own, before, after = drawn("Q6_K", 5)
    after[10:60] = before[10:60]
    raw = quantize_update(after, before, "Q6_K", own=own)
    np.testing.assert_array_equal(raw[10:60], own[10:60])
    assert (raw[:10] != own[:10]).any(axis=1).all()


def test_a_row_of_an_update_too_small_for_a_step_leaves_it_to_the_next():
    """One weight of a row is updated, by a tenth of its step: each tenth row makes that step."""
    own, before, after = drawn("Q4_0", 0, rows=64)
    step = levels_of("Q4_0").grid(own.reshape(-1, 18))[1].reshape(64, N)
    after[:, 7] += np.abs(step[:, 7]).min() / 10
    raw = quantize_update(after, before, "Q4_0", own=own)
    moved = np.flatnonzero((raw != own).any(axis=1))
    assert 4 <= len(moved) <= 8
    assert 0.7 < share(raw, "Q4_0", before, after) < 1.3


def test_a_large_update_gets_scales_of_its_own():
    own, before, _ = drawn("Q4_K", 0)
    after = 20 * np.random.default_rng(3).standard_normal(before.shape).astype(np.float32)
    raw = quantize_update(after, before, "Q4_K", own=own)
    error = np.linalg.norm(dequantize(raw, "Q4_K") - after) / np.linalg.norm(after)
    plain = np.linalg.norm(dequantize(quantize(after, "Q4_K"), "Q4_K") - after)
    assert error < 1.3 * plain / np.linalg.norm(after) < 0.15


def test_types_without_levels_are_packed_as_ever():
    _, before, after = drawn("Q8_0", 30)
    for name in ("F16", "BF16", "IQ3_S"):
        np.testing.assert_array_equal(quantize_update(after, before, name), quantize(after, name))


def test_threads_and_stacked_matrices_change_nothing():
    own, before, after = drawn("Q4_K", 5, rows=700)
    alone = quantize_update(after, before, "Q4_K", own=own)
    n, before_n = threads.get(), after.reshape(7, 100, N)
    threads.set(threads.most())
    try:
        several = quantize_update(before_n, before.reshape(7, 100, N), "Q4_K", own=own)
    finally:
        threads.set(n)
    np.testing.assert_array_equal(several.reshape(700, -1), alone)


def test_unlike_shapes_are_refused():
    with pytest.raises(QuantError, match=r"values of shape \(2, 256\), but \(1, 256\) before"):
        quantize_update(np.zeros((2, 256), np.float32), np.zeros((1, 256), np.float32), "Q4_K")
