"""Caches of every type: kept as ggml's reference makes them, read as the numbers they are."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import pyggml
from pyggml import ops
from pyggml.errors import ConfigError, PyggmlError, ShapeError
from pyggml.generation import Batch, Context, Session
from pyggml.graph.dtypes import DTYPES, F32, Q8_0
from pyggml.graph.tensor import leaf, zeros
from pyggml.kernels.attention import FORWARD, forward_path
from pyggml.models.net import Net
from pyggml.quants import QUANTS, NoPack, dequantize, quantize
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


WRITTEN = [name for name, q in QUANTS.items() if not isinstance(q.pack, NoPack)]
IDS = np.array([4, 0, 2], np.int32)


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_are_packed_as_ggml_does(name, rng):
    """A few rows, and more than one thread packs."""
    for n in (max(64, DTYPES[name].block), 1 << 14):
        x = rng.standard_normal((3, n)).astype(np.float32)
        (found,) = run(ops.set_rows(zeros((5, n), DTYPES[name]), leaf(x), leaf(IDS)))
        rows = found.view(np.uint8)
        np.testing.assert_array_equal(rows[IDS], quantize(x, name))
        assert not rows[[1, 3]].any()


@pytest.mark.parametrize("name", [name for name in WRITTEN if DTYPES[name].quantised])
def test_what_no_block_holds_is_said(name, rng):
    x = rng.standard_normal((3, 256)).astype(np.float32)
    x[1, 7] = np.nan
    graph = ops.set_rows(zeros((5, 256), DTYPES[name]), leaf(x), leaf(IDS))
    if name == "Q8_0":  # as ever: its block becomes NaN
        return
    with pytest.raises(PyggmlError, match=f"packed as {name}; found nan at .1, 7."):
        run(graph)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "IQ4_NL"])
@pytest.mark.parametrize("source", ["F16", "BF16"])
def test_rows_of_halves_are_those_of_floats(kind, source, rng):
    x = rng.standard_normal((3, 64)).astype(np.float32)
    half = leaf(quantize(x, source).view(DTYPES[source].numpy), dtype=DTYPES[source])
    wide = leaf(dequantize(quantize(x, source), source))
    outputs = (ops.set_rows(zeros((5, 64), DTYPES[kind]), s, leaf(IDS)) for s in (half, wide))
    found, wanted = run(*outputs)
    np.testing.assert_array_equal(found, wanted)


def test_what_set_rows_refuses():
    ids, rows = leaf(np.array([0], np.int32)), zeros((1, 256))
    with pytest.raises(ShapeError, match="IQ2_XXS.*a type that is written, but "):
        ops.set_rows(zeros((4, 256), DTYPES["IQ2_XXS"]), rows, ids)
    with pytest.raises(ShapeError, match="rows of 1 numbers .* share blocks"):
        ops.set_rows(zeros((256,), DTYPES["Q4_0"]), zeros((1,)), ids)


# The share of the logits' squares that a cache's rounding may cost, about twice what is measured.
COSTS = {"f32": 1e-10, "bf16": 1e-3, "q8_0": 5e-4, "q5_1": 0.02, "q5_0": 0.02, "q4_1": 0.05}
COSTS |= {"q4_0": 0.1, "iq4_nl": 0.1}
SENSITIVE = {"llama": 8}  # whose random weights make more of an error in keys and values
PAIRS = [("q8_0", "q4_0"), ("bf16", "iq4_nl"), ("q5_0", "f32"), ("f16", "q5_1")]


def logits_of(model, cache_type):
    """In portions of one, a few and many; a slot beside it has another sequence."""
    tokens, batch = np.arange(40) * 7 % 11, Batch(model, 2, 44, cache_type)
    slot, other = batch.open(), batch.open()
    parts = (tokens[i:j] for i, j in pairwise((0, 20, 21, 23, 30, 40)))
    return np.array([batch.feed({slot: part, other: [3]})[slot].copy() for part in parts])


def rounding(remember, pair):
    """Net.remember, which rounds keys and values to these types and keeps them in float32."""

    def rounded(net, name, rows):
        kind = DTYPES[pair[name.endswith("_v")].upper()]
        flat = ops.reshape(rows, (rows.shape[0], -1))
        return remember(net, name, ops.reshape(ops.cpy(ops.cpy(flat, kind), F32), rows.shape))

    return rounded


@pytest.mark.parametrize(
    ("architecture", "cache_type"),
    [
        *(("llama", kind) for kind in [*COSTS, *PAIRS]),
        *((name, kind) for name in ("gemma2", "gemma4", "qwen3") for kind in ("q8_0", PAIRS[0])),
    ],
    ids=str,
)
def test_a_cache_costs_its_rounding_and_nothing_else(architecture, cache_type, tiny, monkeypatch):
    model = pyggml.load(tiny(architecture, sizes=HEADS), compute="f32")
    whole, ends = model.logits(np.arange(40) * 7 % 11), [19, 20, 22, 29, 39]
    found = logits_of(model, cache_type)
    pair = cache_type if isinstance(cache_type, tuple) else (cache_type, cache_type)
    cost = max(COSTS.get(kind, 0) for kind in pair) * SENSITIVE.get(architecture, 1)
    share = ((found - whole[ends]) ** 2).sum() / (whole[ends] ** 2).sum()
    assert share < cost and (cache_type == "f32" or share > 1e-9)
    pair = tuple("f32" if kind == "f16" else kind for kind in pair)  # as with compute f32
    monkeypatch.setattr(Net, "remember", rounding(Net.remember, pair))
    np.testing.assert_allclose(found, logits_of(model, "f32"), rtol=1e-4, atol=1e-4)


def test_a_number_takes_a_little_more_than_a_byte(tiny):
    model = pyggml.load(tiny("llama", sizes=HEADS), compute="int8")
    kinds = "f16", "q8_0", ("q8_0", "q4_0"), ("f16", "q5_1")
    halves, *others = (Session(model, 32, kind).n_bytes for kind in kinds)
    assert [n / halves for n in others] == [34 / 64, 52 / 128, 88 / 128]


def test_a_prefix_is_copied_in_bytes(tiny):
    model = pyggml.load(tiny("llama", sizes=HEADS), compute="f32")
    text = np.arange(20) % 11
    batch = Batch(model, 2, 24, "q8_0")
    one = batch.open()
    wanted = batch.feed({one: text})[one]
    other = batch.open(text)
    assert other.n_past == 19
    np.testing.assert_allclose(batch.feed({other: text[19:]})[other], wanted, rtol=1e-5, atol=1e-6)


def test_settings_name_one_type_or_two():
    assert Context(cache_type="q8_0").cache_types == ("q8_0", "q8_0")
    assert Context(cache_type_v="q4_0").cache_types == ("f16", "q4_0")
    assert Context(cache_type="q8_0", cache_type_k="bf16").cache_types == ("bf16", "q8_0")
    with pytest.raises(ConfigError, match="cache_type_k is 'q4_k', wanted one of f16, "):
        Context(cache_type_k="q4_k")


def test_what_does_not_fit_is_refused(tiny):
    model = pyggml.load(tiny())
    with pytest.raises(ConfigError, match="cache_type_v is q4_0, which needs heads of a multiple"):
        Session(model, 8, ("f16", "q4_0"))
    with pytest.raises(ConfigError, match="q8_0, which needs heads of a multiple of 32.*have 4"):
        Session(model, 8, "q8_0")
    with pytest.raises(ConfigError, match="cache_type is 'q4', wanted f16, f32, .* or iq4_nl"):
        Session(model, 8, "q4")


def test_one_type_beside_those_of_both_is_refused():
    assert Context(cache_type="q8_0", cache_type_v="q4_0").cache_types == ("q8_0", "q4_0")
    with pytest.raises(ConfigError, match="cache_type is q8_0, but keys and values have"):
        Context(cache_type="q8_0", cache_type_k="q5_0", cache_type_v="q4_0")
