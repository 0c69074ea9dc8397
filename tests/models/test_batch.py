"""Sequences in a batch have the logits that each has alone, whoever shares their passes."""

import numpy as np
import pytest
from kinds import each_kind

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.errors import ConfigError, DataError
from pyggml.generation import Batch, Session
from pyggml.generation.passes import TokenPasses
from pyggml.runtime import Program

# Blocks, experts, windows, learned positions, states.
FIXTURES = ("llama", "qwen3moe", "gemma3", "gpt2", "lfm2", "mamba")
LENGTHS = (19, 7, 13)


def assert_same(found, wanted):
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def sequences(n_vocab, lengths=LENGTHS):
    return [np.arange(n) * (3 + 2 * i) % n_vocab for i, n in enumerate(lengths)]


def check_against_alone(model, n_ctx):
    """Prompts of different lengths, together and in pieces; then one token each; then a slot that
    is closed and taken again."""
    texts = sequences(model.config.n_vocab)
    alone = [Session(model, n_ctx) for _ in texts]
    batch = Batch(model, 3, n_ctx)
    slots = [batch.open() for _ in texts]
    for stops in ((5, 2, 9), (17, 6, 9), (18, 7, 10), (19, 7, 11)):
        pieces = {
            slot: text[slot.n_past : stop]
            for slot, text, stop in zip(slots, texts, stops, strict=True)
            if slot.n_past < stop
        }
        found = batch.feed(pieces)
        assert found.keys() == pieces.keys()
        for slot, piece in pieces.items():
            assert_same(found[slot], alone[slots.index(slot)].feed(piece))
    slots[1].close()
    other = batch.open()
    assert other.number == 1
    found = batch.feed({other: texts[2], slots[2]: texts[2][11:]})
    assert_same(found[other], Session(model, n_ctx).feed(texts[2]))
    assert_same(found[slots[2]], alone[2].feed(texts[2][11:]))


def test_a_pass_reads_the_logits_that_are_wanted_alone(tiny, monkeypatch):
    """Of as many as there are slots, which a card would copy with every prompt."""
    model, read, shapes = pyggml.load(tiny("llama")), Program.read, []
    monkeypatch.setattr(Program, "read", lambda of, t: shapes.append(t.shape) or read(of, t))
    batch = Batch(model, 4, 24)
    slots = [batch.open() for _ in range(2)]
    batch.feed({slots[0]: [1, 2, 3, 4, 5, 6]})
    batch.feed({slots[0]: [7], slots[1]: [1, 2, 3, 4, 5]})
    assert [n for n, _ in shapes] == [1, 2]


@pytest.mark.parametrize("architecture", each_kind())
def test_every_architecture_in_a_batch(architecture, tiny):
    check_against_alone(pyggml.load(tiny(architecture), compute="f32"), 24)


@pytest.mark.parametrize("architecture", FIXTURES)
def test_golden_models_in_a_batch(architecture, golden_file):
    check_against_alone(pyggml.load(golden_file(f"{architecture}-Q4_K_M.gguf"), compute="f32"), 24)


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2", "mamba", "rwkv7"])
def test_a_sequence_goes_back(architecture, tiny):
    """Recurrent parts too: they read what is left anew."""
    model = pyggml.load(tiny(architecture), compute="f32")
    text = np.arange(20) * 7 % 11
    session = Session(model, 24)
    session.feed(text)
    session.truncate(12)
    assert session.n_past == 12
    session.truncate(9)
    assert_same(session.feed(text[15:18]), Session(model, 24).feed([*text[:9], *text[15:18]]))
    session.truncate(0)
    assert_same(session.feed(text[:4]), model.logits(text[:4])[-1])
    with pytest.raises(ConfigError, match="n is 5, wanted 0 to 4, the tokens there are"):
        session.truncate(5)


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2", "mamba"])
def test_a_prompt_that_begins_like_another_is_not_read_twice(architecture, tiny):
    model = pyggml.load(tiny(architecture), compute="f32")
    text = np.arange(20) * 7 % 11
    batch = Batch(model, 3, 24)
    first = batch.open(text)
    batch.feed({first: text[:12]})
    taken = batch.open(text[:15])  # from one that is still being written
    assert taken.number != first.number
    assert taken.tokens == text[:12].tolist()
    found = batch.feed({taken: text[12:15], first: text[12:16]})
    assert_same(found[taken], model.logits(text[:15])[-1])
    assert_same(found[first], model.logits(text[:16])[-1])
    first.close()
    taken.close()
    again = batch.open(text)  # from one that is closed, in its place
    assert again.number == first.number
    assert again.n_past == 16
    assert_same(batch.feed({again: text[16:]})[again], model.logits(text)[-1])
    again.close()
    other = batch.open([*text[:9], 2, 2, 2])  # a shorter start: its rows, but no state
    assert other.n_past == (9 if model.batches else 0)
    rest = [*text[:9], 2, 2, 2][other.n_past :]
    assert_same(batch.feed({other: rest})[other], model.logits([*text[:9], 2, 2, 2])[-1])


def test_the_last_token_of_a_prompt_is_always_to_be_fed(tiny):
    """Else there would be no logits of it."""
    batch = Batch(pyggml.load(tiny()), 1, 24)
    slot = batch.open()
    batch.feed({slot: [1, 2, 3]})
    slot.close()
    assert batch.open([1, 2, 3]).n_past == 2


def test_little_that_is_shared_does_not_cost_much_that_is_cached(tiny):
    batch = Batch(pyggml.load(tiny()), 2, 24)
    slot = batch.open()
    batch.feed({slot: np.arange(20) % 11})
    slot.close()
    other = batch.open([0, 1, 7, 7])
    assert other.number != slot.number
    assert other.n_past == 2
    assert slot.n_cached == 20


def test_adapters_share_a_batch(golden_file):
    """Each request has its own, over the same weights; what one has read is no other's prefix."""
    base = pyggml.load(golden_file("qwen3-F16.gguf"), compute="f32")
    tuned = base.with_adapter_files((golden_file("qwen3-lora.gguf"), 0.5))
    text = np.arange(17) * 7 % base.config.n_vocab
    batch = Batch(base, 3, 24)
    slots = batch.open(), batch.open(model=tuned), batch.open(model=tuned)
    found = batch.feed({slot: text[: 15 + i] for i, slot in enumerate(slots)})
    for i, slot in enumerate(slots):
        assert_same(found[slot], slot.model.logits(text[: 15 + i])[-1])
    assert np.abs(base.logits(text[:16]) - tuned.logits(text[:16])).max() > 1e-3
    slots[0].close()
    taken = batch.open(text, tuned)
    assert taken.number == 0
    assert taken.n_past == 16
    slots[1].close()
    with pytest.raises(ConfigError, match="a prefix of another model"):
        batch.open().copy_prefix(taken, 3)


def test_long_prompts_and_short_ones_share_passes(tiny, monkeypatch):
    """The short ones are in the first."""
    monkeypatch.setattr("pyggml.generation.passes.MOST_TOKENS", 12)
    model = pyggml.load(tiny("gemma2"), compute="f32")
    texts = sequences(11, (31, 1, 9))
    batch = Batch(model, 3, 40)
    slots = [batch.open() for _ in texts]
    passes, run = [], Batch._run_pass

    def spy(self, pieces, *every):
        passes.append(dict(pieces))
        return run(self, pieces, *every)

    monkeypatch.setattr(Batch, "_run_pass", spy)
    found = batch.feed(dict(zip(slots, texts, strict=True)))
    assert [list(p.values()) for p in passes] == [[2, 1, 9], [12], [12], [5]]
    for slot, text in zip(slots, texts, strict=True):
        assert_same(found[slot], model.logits(text)[-1])


@pytest.mark.parametrize(("free", "wanted"), [(1 << 40, [12, 8, 1]), (1 << 20, [4] * 5 + [1])])
def test_a_device_that_gains_by_it_runs_several_passes_as_one(tiny, monkeypatch, free, wanted):
    """Where much of its memory is left beside the weights; in multiples of a pass."""
    monkeypatch.setattr("pyggml.generation.passes.MOST_TOKENS", 4)
    monkeypatch.setattr(CPU, "passes_together", 3)
    monkeypatch.setattr(CPU, "memory", lambda self: (free, free))
    model, found, run = pyggml.load(tiny(), compute="f32"), [], Batch._run_pass

    def spy(self, pieces, *every):
        found.extend(pieces.values())
        return run(self, pieces, *every)

    monkeypatch.setattr(Batch, "_run_pass", spy)
    text = sequences(model.config.n_vocab, (21,))[0]
    batch = Batch(model, 1, 24)
    assert_same(batch.feed_one(batch.open(), text), model.logits(text)[-1])
    assert found == wanted


def test_logits_after_every_token_are_those_of_the_whole_text(tiny, monkeypatch):
    """Also of a prompt that takes several passes, beside a sequence whose last ones are wanted."""
    monkeypatch.setattr("pyggml.generation.passes.MOST_TOKENS", 12)
    model = pyggml.load(tiny(), compute="f32")
    batch = Batch(model, 2, 24)
    one, other = batch.open(), batch.open()
    text, another, _ = sequences(model.config.n_vocab)
    found = batch.feed({one: text, other: another}, [one])
    assert_same(found[one], model.logits(text))
    assert_same(found[other], model.logits(another)[-1])


def test_what_fills_a_pass_up_is_of_no_sequence(tiny, monkeypatch):
    """It reads nothing and changes no sequence's rows, also in a pass that was full before."""
    passes, made = [], TokenPasses.__getitem__
    monkeypatch.setattr(
        TokenPasses, "__getitem__", lambda *of: passes.append(made(*of)) or passes[-1]
    )
    batch = Batch(pyggml.load(tiny(), compute="f32"), 2, 40)
    one, other = batch.open(), batch.open()
    batch.feed({one: [5] * 18, other: [6] * 14})
    before = {name: t.data.copy() for name, t in batch.memory.cache.rows.items()}
    batch.feed({one: [7] * 15, other: [8] * 4})
    full, filled = passes
    assert full is filled
    pads, spare = slice(19, 32), batch.memory.first_spare
    rows = [*range(18, 33), *range(40 + 14, 40 + 18), *range(spare, spare + 13)]
    assert filled.rows.tolist() == rows
    assert filled.tokens[pads].tolist() == filled.positions[pads].tolist() == [0] * 13
    assert (filled.span[pads] == spare).all()
    for name, t in batch.memory.cache.rows.items():
        assert set(np.nonzero(t.data != before[name])[0]) == set(rows)


@pytest.mark.parametrize("architecture", ["qwen3", "mamba"])
def test_a_pass_that_was_broken_off_is_made_again(architecture, tiny, monkeypatch):
    model = pyggml.load(tiny(architecture), compute="f32")
    session = Session(model, 24)
    session.feed([1, 2, 3])
    run = Batch._run_pass

    def broken(self, pieces, *every):
        run(self, pieces, *every)
        raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "_run_pass", broken)
    with pytest.raises(KeyboardInterrupt):
        session.feed([4, 5])
    monkeypatch.undo()
    assert session.n_past == 5
    assert_same(session.feed([6]), model.logits([1, 2, 3, 4, 5, 6])[-1])


def test_what_a_batch_refuses(tiny):
    batch = Batch(model := pyggml.load(tiny()), 2, 4)
    with pytest.raises(ConfigError, match=r"n_slots is 0, wanted at least 1.*n_ctx is 0"):
        Batch(model, 0, 0)
    one, other = batch.open(), batch.open()
    with pytest.raises(DataError, match="all 2 slots are taken"):
        batch.open()
    with pytest.raises(DataError, match=r"0 \+ 5 tokens do not fit into a context of 4"):
        batch.feed({one: [1], other: [1] * 5})
    assert one.n_past == 0, "nothing is fed if something is wrong"
    other.close()
    assert batch.n_free == 1
    with pytest.raises(ConfigError, match="slot 1 is not open"):
        batch.feed({other: [1]})
    with pytest.raises(ConfigError, match="another base model"):
        batch.open(model=pyggml.load(tiny()))
