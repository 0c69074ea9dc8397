"""Keys and values in Q8_0: kept as ggml's reference makes them, read as the numbers they are."""

from dataclasses import replace

import numpy as np
import pytest

import pyggml
from pyggml import ops
from pyggml.errors import ConfigError
from pyggml.generation import Batch, Session
from pyggml.graph.dtypes import F32, Q8_0
from pyggml.graph.tensor import leaf, zeros
from pyggml.kernels.attention import FORWARD, forward_path
from pyggml.quants import dequantize, quantize
from pyggml.runtime import run

from attending import arrays, problem_of, run_exactly

HEADS = {"embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1}


def in_q8_0(x):
    """(S, HK, D) as bytes (S, HK, D / 32 · 34)."""
    return quantize(x.reshape(-1, x.shape[-1]), "Q8_0").reshape(*x.shape[:-1], -1)


def floats_of(raw):
    return dequantize(raw.reshape(-1, raw.shape[-1]), "Q8_0").reshape(*raw.shape[:-1], -1)


EXTRAS = {"cap": np.float32(2), "sinks": np.array([0.5, -1, 2, 0, 1, -2], np.float32)}


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("d", [32, 64, 96])
@pytest.mark.parametrize("n_queries", [1, 4, 7, 40])
def test_attention_reads_the_numbers_that_the_bytes_stand_for(n_queries, d, extras, rng):
    ends = 60 + np.arange(n_queries)
    span = np.stack([ends % 7, ends], axis=1)
    a = arrays(rng, n_queries, 100, span, d=d, **extras)
    packed = replace(a, k=in_q8_0(a.k), v=in_q8_0(a.v))
    problem = replace(problem_of(a, bool(extras)), key_type=Q8_0, value_type=Q8_0)
    for path in (path for path in FORWARD if path.takes(problem)):
        run_exactly(path, problem, packed)
        found = a.o.copy()
        wide = replace(a, k=floats_of(packed.k), v=floats_of(packed.v))
        exact = replace(problem, key_type=F32, value_type=F32)
        run_exactly(forward_path(exact), exact, wide)
        np.testing.assert_allclose(found, wide.o, rtol=2e-5, atol=1e-5)


def test_rows_are_quantised_as_ggml_does(rng):
    x = rng.standard_normal((3, 64)).astype(np.float32)
    cache = zeros((5, 64), Q8_0)
    (found,) = run(ops.set_rows(cache, leaf(x), leaf(np.array([4, 0, 2], np.int32))))
    np.testing.assert_array_equal(found[[4, 0, 2]], quantize(x, "Q8_0"))
    assert not found[[1, 3]].any()


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_a_cache_of_bytes_costs_their_rounding(architecture, tiny):
    """In portions of one, a few and many; a slot beside it has another sequence."""
    model = pyggml.load(tiny(architecture, sizes=HEADS), compute="f32")
    tokens = np.arange(40) * 7 % 11
    whole, batch = model.logits(tokens), Batch(model, 2, 44, "q8_0")
    slot, other = batch.open(), batch.open()
    wrong = size = 0.0
    for n in (20, 1, 2, 7, 10):
        found = batch.feed({slot: tokens[slot.n_past :][:n], other: [3]})[slot]
        wanted = whole[slot.n_past - 1]
        wrong, size = wrong + ((found - wanted) ** 2).sum(), size + (wanted**2).sum()
    assert 1e-9 < wrong / size < 1e-3


def test_a_number_takes_a_little_more_than_a_byte(tiny):
    model = pyggml.load(tiny("llama", sizes=HEADS), compute="int8")
    halves, bytes_ = (Session(model, 32, kind).n_bytes for kind in ("f16", "q8_0"))
    assert bytes_ / halves == 34 / 64


def test_a_prefix_is_copied_in_bytes(tiny):
    model = pyggml.load(tiny("llama", sizes=HEADS), compute="f32")
    text = np.arange(20) % 11
    batch = Batch(model, 2, 24, "q8_0")
    one = batch.open()
    wanted = batch.feed({one: text})[one]
    other = batch.open(text)
    assert other.n_past == 19
    np.testing.assert_allclose(batch.feed({other: text[19:]})[other], wanted, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused(tiny):
    model = pyggml.load(tiny())
    with pytest.raises(ConfigError, match="q8_0, which needs heads of a multiple of 32.*have 4"):
        Session(model, 8, "q8_0")
    with pytest.raises(ConfigError, match="cache_type is 'q4', wanted f16 or q8_0"):
        Session(model, 8, "q4")
