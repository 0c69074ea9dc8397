"""Optimiser steps over several steps: what they leave in m and v, and where they lead."""

import numpy as np
import pytest
from normals import floats

from pyggml import threads
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F16
from pyggml.graph.tensor import leaf
from pyggml.jit.tasks import SHARE
from pyggml.ops import OPS, opt_step_half, optim_half
from pyggml.ops.arithmetic.dropout import draw_words, round_by_draw
from pyggml.ops.layout.layout import transpose
from pyggml.ops.optim import adamw_settings, clip_norm, opt_step_adamw, opt_step_sgd
from pyggml.ops.optim_8bit import BLOCK, M_VALUES, V_VALUES, n_blocks, opt_step_adamw_8bit
from pyggml.quants import dequantize, quantize
from pyggml.runtime import Devices, bind, run, schedule


def packed(x, values):
    """Codes and magnitudes of a moment: of each share the nearest place, and its nearest value."""
    whole = np.append(x, np.zeros(-x.size % BLOCK)).reshape(-1, BLOCK)
    most = np.abs(whole).max(axis=1, keepdims=True)
    share = np.divide(whole, most, where=most > 0, out=np.zeros_like(whole))
    places = np.floor((share + 1) / 2 * 65535 + 0.5) / 65535 * 2 - 1
    codes = np.abs(places[..., None] - values.astype(np.float64)).argmin(axis=-1)
    return codes.reshape(-1)[: x.size], most[:, 0]


def test_8_bit_moments_are_values_of_the_paper_s_type_near_their_places():
    assert (len(M_VALUES), len(V_VALUES)) == (256, 256)
    assert [*M_VALUES[[0, 127, 255]]] == pytest.approx([-0.99296875, 0, 1])
    n, betas = 3 * BLOCK + 70, (0.9, 0.999)
    m, v = leaf(np.zeros(n, np.int8)), leaf(np.zeros(n, np.int8))
    p, g, scales = (
        leaf(floats(n)),
        leaf(np.zeros(n, np.float32)),
        leaf(np.zeros((2, n_blocks(n)), "f4")),
    )
    settings = leaf(np.zeros(7, np.float32))
    program = bind(schedule(Graph.of(opt_step_adamw_8bit(p, g, m, v, scales, settings)), Devices()))
    for step in range(1, 4):
        sources = (M_VALUES, m.data, scales.data[0]), (V_VALUES, v.data, scales.data[1])
        old = [a[c.view(np.uint8)] * np.repeat(s, BLOCK)[:n] for a, c, s in sources]
        g.data[:] = floats(n, seed=step) * 10.0 ** np.random.default_rng(step).integers(-5, 1, n)
        settings.data[:] = adamw_settings(0.1, betas, 1e-8, 0.0, step)
        program()
        first = old[0] * betas[0] + g.data * (1 - betas[0])
        second = old[1] * betas[1] + g.data.astype(np.float64) ** 2 * (1 - betas[1])
        codes, most = packed(first, M_VALUES)
        np.testing.assert_allclose(scales.data[0], most, rtol=3e-5)
        assert np.mean(codes == m.data.view(np.uint8)) > 0.99  # a middle falls to either side
        codes, most = packed(second, V_VALUES)
        np.testing.assert_allclose(scales.data[1], most, rtol=3e-5)  # 1 − β in float32 is 1e-5 off
        assert np.mean(codes == v.data.view(np.uint8)) > 0.99 and (v.data != 0).all()


@pytest.mark.skipif(threads.most() < 2, reason="this process has one thread")
def test_the_norm_does_not_depend_on_the_threads():
    """Over whole pieces and the beginning of one more; nor does what is left of the gradient."""
    numbers, made = floats(9 * SHARE + 5), []
    before = threads.get()
    try:
        for n in (1, 2):
            threads.set(n)
            g = leaf(numbers.copy())
            norm = clip_norm(g, 0.5)
            program = bind(schedule(Graph.of(norm), Devices()))
            program()
            made.append((program.read(norm)[0], g.data))
    finally:
        threads.set(before)
    (norm, one), (other, two) = made
    assert norm == other == pytest.approx(np.linalg.norm(numbers.astype(np.float64)), rel=1e-6)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one, numbers * np.float32(0.5 / norm), rtol=1e-6)


def test_a_parameter_with_gaps_is_refused():
    p, g = transpose(leaf(floats(4, 3))), leaf(floats(3, 4))
    with pytest.raises(ShapeError, match=r"opt_step_sgd: p is .* without gaps"):
        opt_step_sgd(p, g, leaf(floats(2)))
    with pytest.raises(ShapeError, match=r"opt_step_adamw: v is .* without gaps"):
        opt_step_adamw(g, g, g, p, leaf(floats(7)))


def test_misfits_are_refused():
    p = leaf(floats(3, 4))
    with pytest.raises(ShapeError, match=r"opt_step_adamw: m is .* wanted F32\[3, 4\]"):
        opt_step_adamw(p, p, leaf(floats(4, 3)), p, leaf(floats(7)))
    with pytest.raises(ShapeError, match=r"settings is .* wanted F32\[2\]"):
        opt_step_sgd(p, p, leaf(floats(7)))


# -- parameters in 16 bits ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
def test_a_half_is_one_of_two_neighbours_and_its_mean_is_the_number(kind):
    """Numbers of all sizes, also F16's subnormal ones; what is a half already stays."""
    x = np.repeat(floats(64) * np.float32(10) ** np.linspace(-8, 2, 64), SHARE // 32)
    x = np.append(np.float32([np.inf, -np.inf, 0, -1.5]), x[4:].astype(np.float32))
    out, bits, total, n_draws = np.empty(x.size, "u2"), np.empty(x.size, "u2"), 0, 40
    for n in range(n_draws):
        round_by_draw(out, x, bits, 0, draw_words(3, n), np.uint64(5), kind is BF16)
        found = dequantize(out.view(kind.numpy), kind.name)
        np.testing.assert_array_equal(found[:4], x[:4])
        total = total + (found[4:] - x[4:])
    unit = 2.0 ** (np.frexp(x[4:])[1] - (8 if kind is BF16 else 11))
    unit = np.maximum(unit, 2.0**-24) if kind is F16 else unit
    assert (np.abs(found[4:] - x[4:]) < unit).all()
    errors = np.add.reduceat(total / unit, np.arange(0, total.size, 128)) / (128 * n_draws)
    assert np.abs(errors).max() < 5 * 0.5 / np.sqrt(60 * n_draws)


@pytest.mark.parametrize("step", [opt_step_adamw_8bit, opt_step_sgd])
def test_a_step_on_halves_is_that_on_floats_rounded_at_any_number_of_threads(step, monkeypatch):
    """In pieces, the last of which is short."""
    monkeypatch.setattr(optim_half, "_PIECE", SHARE)
    n, of_8_bits = 2 * SHARE + 300, step is opt_step_adamw_8bit
    numbers, found = quantize(floats(n), "BF16"), []
    before = threads.get()
    try:
        for n_threads in (1, min(2, threads.most()), 0):
            threads.set(n_threads or before)
            p = leaf(numbers.view(np.uint16).copy(), dtype=BF16)
            p = p if n_threads else leaf(dequantize(numbers, "BF16"))
            moments = [leaf(np.zeros(n, np.int8)) for _ in "mv"] if of_8_bits else []
            moments += [leaf(np.zeros((2, n_blocks(n)), np.float32))] if of_8_bits else []
            settings = adamw_settings(0.01, (0.9, 0.99), 1e-8, 0.1, 1) if of_8_bits else (0.01, 0.1)
            rest = [leaf(floats(n, seed=1)), *moments, leaf(np.float32(settings))]
            if n_threads:
                node = opt_step_half(OPS[step.__name__], p, *rest, leaf(draw_words(1, 2)), stream=3)
            else:
                node = step(p, *rest)
            (result,) = run(node)
            found.append((result, *(t.data for t in moments)))
    finally:
        threads.set(before)
    for one, two, floating in zip(*found, strict=True):
        assert one.tobytes() == two.tobytes()
        if floating.dtype == np.float32 and one.dtype == np.uint16:
            one, unit = dequantize(one, "BF16"), 2.0 ** (np.frexp(floating)[1] - 8)
            assert (np.abs(one - floating) < unit).all() and (one != floating).any()
        else:
            np.testing.assert_array_equal(one, floating)
