"""Preferences: what is in a window, and that such runs are runs like any other."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.lora import (
    DataConfig,
    LoraConfig,
    Source,
    StepReport,
    TrainConfig,
    Trainer,
    ValidationReport,
    attach,
    read_corpus,
    train_tensors,
)
from pyggml.lora.data import Corpus
from pyggml.lora.data.windows.answers import Answer, preferences
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.answers import answer_batches
from pyggml.lora.objectives.choice import objective_of

from runs import steps

CTX = 40
RNG = np.random.default_rng(4)


class Letters:
    """A tokenizer of 40 letters, of which the first ends a text."""

    eos_id, eot_id, bos_id, add_bos, add_eos = 0, None, None, False, False
    chat_templates = ()

    def encode(self, text, parse_special=False):
        return [ord(c) - ord("@") for c in text]


def answer(n_prompt, n, wanted):
    ids = RNG.integers(1, 48, n_prompt + n)
    return Answer([int(i) for i in ids], np.arange(n_prompt + n) >= n_prompt, wanted)


def pairs(n):
    found = []
    for i in range(n):
        chosen, rejected = answer(3, 3 + i % 5, True), answer(3, 4 + i % 3, False)
        found.append([chosen, rejected])
    return found


def corpus_for(kind, n=12, n_held_out=3):
    units = pairs(n)
    if kind == "kto":
        units = [[a] for pair in units for a in pair]
    cut = len(units) - n_held_out
    parts = [preferences(u, CTX, mismatch=kind == "kto") for u in (units[:cut], units[cut:])]
    return Corpus(*parts)


CORPORA = {kind: corpus_for(kind) for kind in ("dpo", "orpo", "kto", "simpo", "ipo")}


@pytest.fixture
def trainer_of(tiny):
    """(kind, lora settings, **train settings) -> a trainer whose adapter changes something."""

    def make(kind, preference=None, corpus=None, modules=None, **settings):
        settings = {"lr": 0.02, "warmup_steps": 1, "batch": 2, "compute": "f32", **settings}
        model = pyggml.load(tiny, compute="f32")
        adapter = attach(model, LoraConfig(rank=3, alpha=5.0, modules=modules))
        for name, pair in adapter.pairs.items():
            if name != "output.weight":
                pair.b.data[:] = np.random.default_rng(1).normal(0, 0.1, pair.b.shape)
        return Trainer(
            adapter.model,
            adapter.parameters,
            corpus or CORPORA[kind],
            TrainConfig(**settings),
            OBJECTIVES[kind](**(preference or {"beta": 0.3})),
            reference=model,
        )

    return make


# -- data ---------------------------------------------------------------------------------------


def test_pairs_lie_whole_in_windows_and_only_completions_are_learned():
    units = pairs(9)
    data = preferences(units, CTX, mismatch=False)
    found, learned = {}, {}
    whole = zip(data.tokens, data.documents, data.trained, data.signs, strict=True)
    for tokens, documents, trained, signs in whole:
        for number in np.unique(documents[documents >= 0]):
            assert number not in found, "an answer is in one window"
            found[number] = list(tokens[documents == number])
            learned[number] = list(trained[documents == number])
        assert len(np.unique(documents[documents >= 0])) == (n := np.count_nonzero(signs))
        assert n % 2 == 0 and (signs[:n:2] == 1).all() and (signs[1:n:2] == -1).all()
    assert len(found) == 18
    in_order = [a for unit in units for a in unit]
    for number, a in zip(sorted(found), in_order, strict=True):
        assert found[number] == a.ids and learned[number] == list(a.trained)


def test_kto_moves_completions_on_within_a_window():
    units = [[answer(2 + i, 3 + i % 4, i % 2 == 0)] for i in range(7)]
    data = preferences(units, 30, mismatch=True)
    assert len(data) == len(data.mismatched) > 1
    for window in range(len(data)):
        both = [
            [d.tokens[window][d.documents[window] == n] for n in unique_in_order(d, window)]
            for d in (data, data.mismatched)
        ]
        assert len(both[0]) == len(both[1])
        if len(both[0]) > 1:
            assert sum(map(len, both[0])) == sum(map(len, both[1])), "as many tokens"
    (first, second) = (unit[0] for unit in units[:2])
    row = data.mismatched
    moved = row.tokens[0][row.documents[0] == unique_in_order(row, 0)[1]]
    assert list(moved) == [*second.ids[:3], *first.ids[2:]]


def unique_in_order(data, window):
    documents = data.documents[window]
    return list(dict.fromkeys(documents[documents >= 0]))


def test_rows_become_answers():
    def read(kind, rows, ctx=16, share=0.0):
        source, config = Source(Path("a"), rows=rows), DataConfig(ctx=ctx, val_split=share)
        return read_corpus([source], Letters(), config, rows=kind)

    pairs = [
        {"prompt": "AB", "chosen": "CD", "rejected": "E"},
        {"prompt": "BC", "chosen": "DA", "rejected": "EF"},
    ]
    answers = [{"prompt": "AB", "completion": "CC", "label": False}]
    corpus = read("pairs", pairs, share=0.5)
    assert corpus.n_documents == 2 and corpus.n_held_out == 1 and corpus.kind == "pairs"
    assert list(corpus.train.tokens[0, :10]) == [2, 3, 4, 1, 0, 2, 3, 5, 6, 0]
    assert corpus.train.n_targets() == 6  # two letters and an end, twice
    assert read("labels", 5 * answers).n_documents == 5
    with pytest.raises(DataError, match="a: row 3 has .*completion and label, which"):
        read("pairs", pairs + answers)
    with pytest.raises(DataError, match="a: row 1 has .*chosen and rejected, which"):
        read("labels", pairs)
    with pytest.raises(DataError, match="row 2 has 10 tokens, prompts included, the most of 2"):
        read("pairs", pairs, ctx=6)
    with pytest.raises(DataError, match="row 1 "):
        read("pairs", ["A"])
    with pytest.raises(DataError, match="there is one, wanted two"):
        read("labels", answers)


# -- losses -------------------------------------------------------------------------------------


SETTINGS = {
    "dpo": {"beta": 0.4, "label_smoothing": 0.2},
    "orpo": {"beta": 0.7},
    "kto": {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6},
    "simpo": {"beta": 2.5, "gamma": 0.4},
    "ipo": {"beta": 0.6},
}


def run(trainer):
    events = []
    trainer.run(events.append)
    return steps(events)


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_whole_logits_give_the_same_numbers(kind, trainer_of):
    """An adapter of the output matrix, here with a B of zeros, forbids the fused head. That the
    losses of steps are the formulas': test_parity.py."""
    runs = []
    for modules in (("attn_q",), ("attn_q", "output")):
        how = {"modules": modules, "grad_accum": 2, "max_steps": 1, "clip": 0.0}
        trainer = trainer_of(kind, SETTINGS[kind], **how)
        runs.append(([step.loss for step in run(trainer)], trainer.parameters.gradients))
    (losses, gradients), (others, again) = runs
    assert losses == pytest.approx(others, rel=2e-5)
    for name, g in gradients.items():
        most = 1e-5 * np.abs(g.data).max()
        np.testing.assert_allclose(again[name].data, g.data, rtol=1e-3, atol=most)


def test_smoothing_adds_a_share_of_the_margin(trainer_of):
    """-(1 - e) ln σ(x) - e ln σ(-x) = -ln σ(x) + e x."""
    plain, smoothed = (
        run(trainer_of("dpo", {"beta": 0.4, "label_smoothing": e}, max_steps=1))[0]
        for e in (0.0, 0.2)
    )
    assert abs(plain.rewards.margin) > 1e-3
    assert smoothed.loss - plain.loss == pytest.approx(0.2 * plain.rewards.margin, rel=1e-3)


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_the_output_matrix_itself_can_be_trained(kind, tiny):
    model = pyggml.load(tiny, compute="f32")
    trained = train_tensors(model, ["output.weight"])
    lr = 0.002 if kind == "ipo" else 0.02  # IPO's square overshoots its lead at a high rate
    config = TrainConfig(lr=lr, warmup_steps=0, epochs=3, batch=2, compute="f32")
    objective = OBJECTIVES[kind](**SETTINGS[kind])
    args = (trained.model, trained.parameters, CORPORA[kind], config, objective)
    made = run(Trainer(*args, reference=model))
    first, last = (sum(step.loss for step in made[some]) for some in (slice(3), slice(-3, None)))
    assert last < first, "of an epoch each, so of the same windows"
    assert len(made) == 9 and made[-1].token_accuracy is None


# -- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_what_is_preferred_becomes_likelier(kind, trainer_of):
    trainer = trainer_of(kind, epochs=8, lr=0.01, grad_accum=2, val_every=5)
    events = []
    trainer.run(events.append)
    made = [e for e in events if isinstance(e, StepReport)]
    assert made[-1].loss < 0.9 * made[0].loss
    assert made[-1].rewards.margin > made[0].rewards.margin
    assert made[-1].rewards.accuracy > 0.9
    held_out = [e for e in events if isinstance(e, ValidationReport)]
    assert all(e.rewards.n_chosen > 0 and e.rewards.n_rejected > 0 for e in held_out)


def test_before_training_nothing_is_preferred(tiny):
    model = pyggml.load(tiny, compute="f32")
    adapter = attach(model, LoraConfig(rank=3))
    config = TrainConfig(max_steps=1, compute="f32")
    args = (adapter.model, adapter.parameters, CORPORA["dpo"], config, OBJECTIVES["dpo"]())
    events = run(Trainer(*args, reference=model))
    assert events[0].loss == pytest.approx(np.log(2), abs=1e-6)
    assert events[0].rewards.margin == 0 and events[0].rewards.accuracy == 0


def test_another_objective_is_another_run(trainer_of, tmp_path):
    trainer_of("dpo", max_steps=2, checkpoint_dir=str(tmp_path)).run()
    other = trainer_of("dpo", {"beta": 0.2}, max_steps=2)
    with pytest.raises(pyggml.errors.CheckpointError, match="beta is 0.3 there and 0.2 here"):
        other.resume(tmp_path / "step-00000002.gguf")


def test_text_is_no_preference(trainer_of, corpus_of):
    trainer = trainer_of("dpo", corpus=corpus_of(CTX))
    with pytest.raises(ConfigError, match="objective is dpo, but the corpus has no preferences"):
        trainer.reserve()


def test_settings_of_another_objective_are_refused():
    with pytest.raises(ConfigError, match="label_smoothing is for dpo, not for kto"):
        objective_of("kto", label_smoothing=0.1)
    with pytest.raises(ConfigError, match="beta is for dpo, orpo, kto, simpo and ipo, not for sft"):
        objective_of("sft", beta=0.2)
    assert objective_of("dpo", beta=0.2) == OBJECTIVES["dpo"](beta=0.2)
    assert objective_of("simpo").beta == 2.0 and objective_of("kto").beta == 0.1
    assert objective_of("sft", beta=0.1).name == "sft", "a file of settings may hold defaults"


def test_a_fixed_model_is_asked_for(trainer_of):
    trainer = trainer_of("ipo")
    trainer.reference = None
    with pytest.raises(ConfigError, match="ipo, which compares answers with a fixed model"):
        trainer.reserve()
    trainer = trainer_of("simpo")
    trainer.reference = None
    assert trainer.reserve().arena > 0


def test_a_batch_weighs_as_much_as_its_answers():
    """Which says how sure a validation of several batches is."""
    data = CORPORA["dpo"].train
    reference = np.zeros((len(data), 16), np.float32)
    batches = list(answer_batches(OBJECTIVES["dpo"](), data, range(len(data)), 1, reference, 0.0))
    shares = [b.share.sum() for b in batches]
    assert len(shares) > 1 and [b.weight for b in batches] == pytest.approx(shares)
