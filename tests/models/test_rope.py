"""Frequency factors: one set for all sequences, or one for short and one for long ones."""

import numpy as np
import pytest
from separate_cpu import SeparateCPU

import pyggml
from pyggml import gguf
from pyggml.errors import ModelError
from pyggml.generation import Batch, Session, ahead
from pyggml.graph.dtypes import F32

FACTORS = {"short": np.array([1.0, 3.0], np.float32), "long": np.array([2.0, 0.5], np.float32)}
TOKENS = np.arange(12) % 11


@pytest.fixture
def phi3(tiny, tmp_path):
    """Write a phi3 with frequency factors by tensor name; beyond 8 tokens are long sequences."""

    def write(factors, backends=()):
        plain = tiny("phi3", keys={"phi3.rope.scaling.original_context_length": 8})
        with gguf.open(plain) as file:
            tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
            tensors += [(f"{name}.weight", F32, a.shape, a) for name, a in factors.items()]
            path = tmp_path / f"{'-'.join(factors)}.gguf"
            gguf.write(path, file.metadata, tensors)
        return pyggml.load(path, compute="f32", backends=backends)

    return write


@pytest.fixture
def kinds(phi3):
    """A model with both sets of factors; one with the short ones alone, one with the long ones."""
    both = phi3({f"rope_factors_{kind}": a for kind, a in FACTORS.items()})
    return both, *(phi3({"rope_freqs": a}) for a in FACTORS.values())


def assert_same(found, wanted):
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_long_sequence_has_factors_of_its_own(kinds):
    """As many rows are compared: how a product is summed may depend on their number, as in AMX."""
    both, short, long = kinds
    np.testing.assert_array_equal(both.logits(TOKENS[:8]), short.logits(TOKENS[:8]))
    np.testing.assert_array_equal(both.logits(TOKENS), long.logits(TOKENS))
    assert np.abs(long.logits(TOKENS) - short.logits(TOKENS)).max() > 0.1


def test_room_changes_nothing(kinds):
    """llama.cpp takes the long factors wherever more tokens would fit."""
    both, short, _ = kinds
    for n_ctx in (8, 9, 40):
        assert_same(Session(both, n_ctx).feed(TOKENS[:4]), short.logits(TOKENS[:4])[-1])


@pytest.mark.parametrize("architecture", ["phi3", "minicpm3"])
def test_what_is_cached_is_read_again_beyond_the_original_context(architecture, tiny):
    """Token by token, across and back, by keys of whole heads and by latent ones."""
    keys = {f"{architecture}.rope.scaling.original_context_length": 8}
    tensors = {f"rope_factors_{kind}.weight": a for kind, a in FACTORS.items()}
    both = pyggml.load(tiny(architecture, keys, tensors), compute="f32")
    session = Session(both, 16)
    for i, token in enumerate(TOKENS, 1):
        assert_same(session.feed([token]), both.logits(TOKENS[:i])[-1])
    session.truncate(5)
    assert_same(session.feed([7]), both.logits([*TOKENS[:5], 7])[-1])


def test_sequences_of_both_lengths_share_passes(kinds):
    """A prompt in pieces is as long as the whole from the first one on."""
    both, short, long = kinds
    batch = Batch(both, 3, 16)
    slots = [batch.open(text) for text in (TOKENS, TOKENS[:6], TOKENS[:8])]
    first = batch.feed(dict.fromkeys(slots, TOKENS[:5]), every=slots[:1])
    assert_same(first[slots[0]], long.logits(TOKENS)[:5])
    assert_same(first[slots[1]], short.logits(TOKENS[:5])[-1])
    ends = (12, 6, 9)
    found = batch.feed({s: TOKENS[5:end] for s, end in zip(slots, ends, strict=True)})
    for slot, end, model in zip(slots, ends, (long, short, long), strict=True):
        assert_same(found[slot], model.logits(TOKENS[:end])[-1])


def test_a_prompt_shares_what_was_read_with_its_factors(kinds):
    batch = Batch(kinds[0], 3, 16)
    for n in (12, 8):
        slot = batch.open(TOKENS[:n])
        batch.feed({slot: TOKENS[:n]})
    for n, n_shared in ((11, 10), (7, 6)):
        slot = batch.open(TOKENS[:n])
        assert slot.n_past == n_shared and slot.is_long == (n > 8)
        assert_same(batch.feed_one(slot, TOKENS[n_shared:n]), kinds[0].logits(TOKENS[:n])[-1])
        slot.close()


def test_a_shift_back_into_the_original_context(kinds):
    both, short, _ = kinds
    session = Session(both, 12)
    session.feed(TOKENS)
    assert session.shift(2) == 5
    assert_same(session.feed([3]), short.logits([*TOKENS[:2], *TOKENS[7:], 3])[-1])


def test_a_shift_beyond_the_original_context(tiny):
    """In one layer, where no key has taken anything from another token."""
    keys = {"phi3.rope.scaling.original_context_length": 8}
    tensors = {f"rope_factors_{kind}.weight": a for kind, a in FACTORS.items()}
    both = pyggml.load(tiny("phi3", keys, tensors, {"block_count": 1}), compute="f32")
    session, text = Session(both, 24), np.arange(24) * 7 % 11
    session.feed(text)
    n = session.shift(3)
    assert_same(session.feed([3]), both.logits([*text[:3], *text[3 + n :], 3])[-1])


def test_a_device_that_runs_ahead_stops_at_the_original_context(phi3, monkeypatch):
    factors = {f"rope_factors_{kind}": a for kind, a in FACTORS.items()}
    count, start = [0], ahead.Ahead.start
    monkeypatch.setattr(ahead.Ahead, "start", lambda a: (count.append(0), start(a))[1])
    apart = phi3(factors, [SeparateCPU()])
    found = [*Session(apart, 16).greedy(TOKENS[:4])]
    assert len(count) > 10, "it ran ahead before and after"
    text = TOKENS[:4].tolist()
    for token in found:
        assert token == int(apart.logits(text)[-1].argmax())
        text.append(token)
    assert len(found) == 13


def test_half_a_set_of_factors(phi3):
    with pytest.raises(ModelError, match="rope_factors_short.weight is missing"):
        phi3({"rope_factors_long": FACTORS["long"]})
