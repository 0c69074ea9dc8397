"""Optimiser steps over several steps: what they leave in m and v, and where they lead."""

import numpy as np
import pytest

from pyggml import threads
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.jit.tasks import SHARE
from pyggml.ops.layout.layout import transpose
from pyggml.ops.optim import adamw_settings, clip_norm, opt_step_adamw, opt_step_sgd
from pyggml.ops.optim_8bit import BLOCK, M_VALUES, V_VALUES, n_blocks, opt_step_adamw_8bit
from pyggml.runtime import Devices, bind, schedule


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_adamw_over_steps_is_the_papers_algorithm():
    alpha, beta1, beta2, eps, decay = 0.05, 0.9, 0.99, 1e-8, 0.1
    p, g = leaf(floats(3, 50)), leaf(np.zeros((3, 50), np.float32))
    m, v = leaf(np.zeros((3, 50), np.float32)), leaf(np.zeros((3, 50), np.float32))
    settings = leaf(np.zeros(7, np.float32))
    want, want_m, want_v = p.data.astype(np.float64), 0.0, 0.0
    program = bind(schedule(Graph.of(opt_step_adamw(p, g, m, v, settings)), Devices()))
    for n in range(1, 6):
        g.data[:] = floats(3, 50, seed=n)
        hats = (1 / (1 - beta1**n), 1 / (1 - beta2**n))
        settings.data[:] = (alpha, beta1, beta2, eps, decay, *hats)
        program()
        want_m = beta1 * want_m + (1 - beta1) * g.data
        want_v = beta2 * want_v + (1 - beta2) * g.data.astype(np.float64) ** 2
        want -= alpha * decay * want
        want -= alpha * want_m * hats[0] / (np.sqrt(want_v * hats[1]) + eps)
    np.testing.assert_allclose(p.data, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(m.data, want_m, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(v.data, want_v, rtol=1e-4, atol=1e-6)


def packed(x, values):
    """Codes and magnitudes of a moment, as the paper has them: the nearest of all values."""
    whole = np.append(x, np.zeros(-x.size % BLOCK)).reshape(-1, BLOCK)
    most = np.abs(whole).max(axis=1, keepdims=True)
    share = np.divide(whole, most, where=most > 0, out=np.zeros_like(whole))
    codes = np.abs(share[..., None] - values.astype(np.float64)).argmin(axis=-1)
    return codes.reshape(-1)[: x.size], most[:, 0]


def test_8_bit_moments_are_the_nearest_values_of_the_paper_s_type():
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
        assert np.mean(np.maximum(codes, 1) == v.data.view(np.uint8)) > 0.99


def test_sgd_with_decay_reaches_the_minimum_it_must():
    """Of |p − 1|²/2 + wd·|p|²/2, which is p = 1 / (1 + wd)."""
    p, g = leaf(floats(7)), leaf(np.zeros(7, np.float32))
    program = bind(
        schedule(Graph.of(opt_step_sgd(p, g, leaf(np.array([0.2, 0.5], np.float32)))), Devices())
    )
    for _ in range(100):
        g.data[:] = p.data - 1
        program()
    np.testing.assert_allclose(p.data, 1 / 1.5, rtol=1e-5)


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
