"""A key-value cache changes nothing: tokens fed in any portions give the logits of the whole.

Nothing but rounding, where it keeps halves: those tests say how much.
"""

import gc
import tracemalloc

import numpy as np
import pytest
from separate_cpu import SeparateCPU

import pyggml
from pyggml.errors import DataError
from pyggml.generation import Batch, Session, passes
from pyggml.generation.memory import CacheMemory
from pyggml.graph.dtypes import F16, F32
from pyggml.kernels.attention.row_softmax import SCALES
from pyggml.kernels.gemm import CHOSEN
from pyggml.sizes import round_up

SOME = ("llama", "mistral", "qwen2", "qwen3", "qwen3moe")
FILES = [(a, k) for a in SOME for k in ("F16", "Q8_0", "Q4_K_M")]
FILES += [("lfm2", "Q4_K_M"), ("mamba", "Q4_K_M")]
PORTIONS = [[1] * 20, [20], [13, 1, 1, 4, 1], [3, 7, 2, 8], [1, 19]]


def assert_same(found, wanted):
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("architecture", "kind"), FILES)
def test_portions_give_the_logits_of_the_whole(architecture, kind, golden_file, golden):
    model = pyggml.load(golden_file(f"{architecture}-{kind}.gguf"), compute="f32")
    tokens = golden(architecture)["tokens"][:20]
    whole = model.logits(tokens)
    for portions in PORTIONS:
        session = Session(model, 24)
        for n in portions:
            logits = session.feed(tokens[session.n_past : session.n_past + n])
            assert_same(logits, whole[session.n_past - 1])
        assert session.n_past == 20


def test_with_an_adapter(golden_file, golden):
    path, adapter = golden_file("qwen3-F16.gguf"), golden_file("qwen3-lora.gguf")
    model = pyggml.load(path, adapter, compute="f32")
    tokens = golden("qwen3")["tokens"][:20]
    session = Session(model, 20)
    session.feed(tokens[:15])
    assert_same(session.feed(tokens[15:]), model.logits(tokens)[-1])


@pytest.mark.parametrize("backends", [(), (SeparateCPU("f32"),)], ids=["host", "device"])
def test_a_session_frees_its_memory_when_it_is_dropped(tiny, backends, monkeypatch):
    """Cache and arena, those of programs that have given way too, without Python's search for what
    refers to itself: of that a graph has 130 KB, the cache 1 MB."""
    monkeypatch.setattr(passes, "_MOST_KEPT", 1)
    model = pyggml.load(tiny("qwen3"), compute="f32", backends=backends)

    def use() -> int:
        session = Session(model, 8192)
        session.feed(np.arange(40) % 11)
        assert session.feed([1, 2]).any()
        return session.n_bytes

    use()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        n_bytes = use()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert left < n_bytes / 4


HALVES = ("llama", "gemma2", "gemma4", "gpt-oss", "falcon", "lfm2", "qwen3", "qwen3next")


def fed_error(model, tokens):
    """Squares of what is wrong after portions of one, a few and many tokens, and over chunks, as a
    share of the squares of the logits of the whole."""
    whole, wrong, all_of_it = model.logits(tokens), 0.0, 0.0
    for portions in [[1] * 5, [20, 1, 2, 3, 4, 5], [3, 1, 36]]:
        session = Session(model, 44)
        for n in portions:
            logits = session.feed(tokens[session.n_past : session.n_past + n])
            wanted = whole[session.n_past - 1]
            wrong += ((logits - wanted) ** 2).sum()
            all_of_it += (wanted**2).sum()
    return wrong / all_of_it


@pytest.mark.parametrize("architecture", HALVES)
def test_a_cache_in_float16_costs_their_rounding(architecture, tiny, monkeypatch):
    """Caps, sinks, windows, recurrent layers. 11 bits are 2e-8 in squares, which layers enlarge.
    Tiles (AMX) and pairs of bfloat16 round what a whole prompt multiplies, and are not taken for
    few tokens: 5.2e-5 in squares (llama), where bytes alone cost 3e-4."""
    monkeypatch.setattr("pyggml.generation.passes.MOST_TOKENS", 16)
    error = fed_error(pyggml.load(tiny(architecture)), np.arange(40) * 7 % 11)
    assert 1e-12 < error < (6e-5 if CHOSEN.tiles or SCALES else 1e-5)


@pytest.mark.parametrize("fastest", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["qwen3-Q8_0", "llama-Q4_K_M"])
def test_halves_are_lost_in_the_rounding_of_products(fastest, name, golden_file, monkeypatch):
    """In bytes, what differs little before rounding may differ by a whole step after it."""
    monkeypatch.setattr("pyggml.models.on_devices.FASTEST", fastest)
    monkeypatch.setattr("pyggml.generation.passes.MOST_TOKENS", 16)
    model = pyggml.load(golden_file(f"{name}.gguf"))
    assert fed_error(model, np.arange(40) * 7 % model.config.n_vocab) < 1e-3


@pytest.mark.parametrize(("compute", "kind"), [("auto", F16), ("f32", F32)])
def test_only_keys_and_values_are_halves_and_not_if_all_is_exact(compute, kind, tiny):
    cache = Batch(pyggml.load(tiny("qwen3next"), compute=compute), 1, 8).memory.cache
    assert {t.dtype for t in cache.rows.values()} == {kind}
    assert {t.dtype for t in cache.state.values()} == {F32}


def test_a_long_prompt_goes_in_by_chunks(tiny, monkeypatch):
    model = pyggml.load(tiny("qwen3"), compute="f32")
    tokens = np.arange(30) % 11
    monkeypatch.setattr("pyggml.generation.passes.MOST_TOKENS", 8)
    session = Session(model, 30)
    assert_same(session.feed(tokens), model.logits(tokens)[-1])
    assert session.n_past == 30


def test_a_cache_lies_in_one_array(tiny):
    """Of several small ones Linux makes no huge pages."""
    tensors = CacheMemory(pyggml.load(tiny("qwen3")), 1, 7, 0, "f16").cache.tensors
    places = [t.data.ctypes.data for t in tensors]
    ends = [at + round_up(t.n_bytes, 64) for at, t in zip(places, tensors, strict=True)]
    assert places[0] % 64 == 0 and places[1:] == ends[:-1] and len(places) > 2


def test_sessions_do_not_disturb_each_other(tiny):
    model = pyggml.load(tiny(), compute="f32")
    tokens = np.arange(12) % 11
    whole, backwards = model.logits(tokens), model.logits(tokens[::-1])
    one, other = Session(model, 12), Session(model, 12)
    for i in range(0, 12, 4):
        found, reverse = one.feed(tokens[i : i + 4]), other.feed(tokens[::-1][i : i + 4])
        assert_same(found, whole[i + 3])
        assert_same(reverse, backwards[i + 3])


def test_logits_stay_after_more_tokens(tiny):
    session = Session(pyggml.load(tiny()), 8)
    first = session.feed([1, 2, 3])
    kept = first.copy()
    session.feed([4, 5, 6])
    np.testing.assert_array_equal(first, kept)


def test_a_full_cache_takes_nothing_more(tiny):
    session = Session(pyggml.load(tiny()), 4)
    session.feed([1, 2, 3])
    with pytest.raises(DataError, match=r"3 \+ 2 tokens do not fit into a context of 4"):
        session.feed([4, 5])
    assert session.n_past == 3
    session.feed([4])


@pytest.mark.parametrize("tokens", [[], [11], [-1], [1.5], [[1, 2]], "ab"])
def test_tokens_are_checked(tokens, tiny):
    model = pyggml.load(tiny())
    if tokens != [[1, 2]]:  # a list of texts to a model, nothing to a session
        with pytest.raises(DataError, match=r"tokens: .* wanted"):
            model.logits(tokens)
    with pytest.raises(DataError, match=r"tokens: .* wanted"):
        Session(model, 4).feed(tokens)


def test_rows_of_logits_depend_on_earlier_tokens_only(tiny):
    model = pyggml.load(tiny("qwen3"))
    tokens = np.arange(20) % 11
    changed = tokens.copy()
    changed[15:] = 3
    one, other = model.logits(tokens), model.logits(changed)
    np.testing.assert_array_equal(one[:15], other[:15])
    assert np.abs(one[15:] - other[15:]).max() > 1e-3
