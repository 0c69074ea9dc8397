"""Classification: rows, labels, the loss among labels, and what is refused."""

import json

import numpy as np
import pytest
from tiny_models import write_llama

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.look.confusion import Confusion
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, Trainer, attach, corpus, read_corpus
from pyggml.lora.data import Encoding
from pyggml.lora.data.labels import Labels
from pyggml.lora.data.records.rows import ClassRow, RowPlace
from pyggml.lora.evaluate.classes import classify, labels_in, labels_of
from pyggml.lora.objectives.classify import Classify
from pyggml.lora.record.records import record_of

from chats import vocabulary

LABELS = ("good", "bad", "none")
ROWS = [{"text": f"{'xyz'[i % 3] * 5} {i}", "label": LABELS[i % 3]} for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_llama(path, 270, n_layer=2, seed=1, keys={"llama.context_length": 256})
    model = pyggml.load(path, compute="f32")
    model.__dict__["tokenizer"] = vocabulary()
    return model


def read(model, rows=ROWS, held_out=None, **settings):
    settings = {"ctx": 48, "val_split": 0.25} | settings
    return corpus(rows, model, DataConfig(**settings), held_out=held_out, purpose="classes")


def run_of(model, data, objective=None, **settings):
    adapter = attach(model, LoraConfig(rank=2))
    p = adapter.parameters.data
    p[:] = np.random.default_rng(0).normal(0, 0.1, p.size)
    settings = {"lr": 0.02, "max_steps": 3, "warmup_steps": 1, "batch": 2} | settings
    args = (adapter.model, adapter.parameters, data, TrainConfig(**settings))
    return Trainer(*args, objective or Classify())


def test_a_row_has_one_token_to_learn_which_is_its_label_s(model):
    data = read(model)
    labels, n = Labels.read(data.about["pyggml.labels"]), data.train.n_targets()
    assert set(labels.names) == set(LABELS) and len(set(labels.tokens.values())) == 3
    assert n + data.validation.n_targets() == len(ROWS)
    learned = data.train.tokens[:, 1:][data.train.targets()]
    assert set(learned.tolist()) == set(labels.tokens.values())
    numbers = labels.numbers(learned)
    assert [labels.names[i] for i in numbers[:3]] == [
        next(k for k, t in labels.tokens.items() if t == token) for token in learned[:3]
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_a_text_that_is_cut_keeps_its_label(model, packing):
    long = [*ROWS, {"text": "x" * 90, "label": "good"}]
    data = read(model, long, long_chats="truncate", packing=packing, val_split=0.0)
    assert data.train.n_targets() == len(long) and data.files[0].n_truncated == 1
    with pytest.raises(DataError, match="wanted at most 49, those of a window of 48"):
        read(model, long)


def test_a_label_has_the_first_token_that_no_other_has():
    words = {"very good": (5, 6), "very bad": (5, 7), "very": (5,)}
    tokens = Labels.choose(words, vocabulary()).tokens
    assert tokens["very good"] == 6 and tokens["very bad"] == 7
    assert tokens["very"] not in (5, 6, 7), "a letter's, as its own is theirs too"


def test_labels_of_a_file_are_checked():
    with pytest.raises(DataError, match="no object of 2 to 200 labels"):
        Labels.read('{"a": 1}')
    for text in ("[1", '{"a": 1, "b": 1}', '{"a": 1, "b": 400}', '{"a": 1, "b": true}', None):
        with pytest.raises(DataError):
            Labels.read(text, 300)
    labels = Labels({"a": 3, "b": 1})
    assert Labels.read(labels.text(), 300) == labels


def test_classes_may_be_balanced(model):
    """By numbers that are their rows' inverse. That such a loss is torch's: test_parity.py."""
    data = read(model, ROWS[:7], packing=False, val_split=0.0)  # 3 good, 2 bad, 2 none
    losses = []
    for words in ("balanced", f"good={7 / 9},bad={7 / 6},none={7 / 6}", "none"):
        events, how = [], {"batch": 4, "grad_accum": 2, "max_steps": 1}
        run_of(model, data, Classify(class_weights=words), **how).run(events.append, progress=False)
        assert sum(events[0].tally.counts) == 7
        losses.append(events[0].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) != losses[2]


def test_what_is_taken_for_what():
    found = Confusion.of(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]), 4)
    assert found.counts.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(found.precision, [1, 1 / 3, 0, 0])
    np.testing.assert_allclose(found.recall, [0.5, 1, 0, 0])
    np.testing.assert_allclose(found.f1, [2 / 3, 0.5, 0, 0])
    assert found.accuracy == 0.5 and found.macro_f1 == pytest.approx((2 / 3 + 0.5) / 3)


def test_what_a_run_reports_and_writes(model):
    trainer, events = run_of(model, read(model), max_steps=40), []
    trainer.run(events.append, progress=False)
    first, last = record_of(events[0]), record_of(events[-1])
    assert "confusion" in first["classes"] and "confusion" not in record_of(events[1])["classes"]
    assert last["classes"]["accuracy"] == 1.0 == last["classes"]["macro_f1"]
    assert np.sum(last["classes"]["confusion"]) == events[-1].n_tokens
    labels = Labels.read(trainer.parameters.metadata["pyggml.labels"])
    assert set(labels.names) == set(LABELS)
    rows = [
        ClassRow(RowPlace("f", "row", i + 1), r["text"], r["label"]) for i, r in enumerate(ROWS)
    ]
    found = classify(trainer.model, rows, labels, Encoding(), 48, False)
    assert found.right["acc"].mean() == 1.0 and np.trace(found.confusion.counts) == 24
    with pytest.raises(DataError, match="row 1 has the label 'odd', wanted one of bad, good, none"):
        classify(model, [ClassRow(rows[0].place, "a", "odd")], labels, Encoding(), 48, False)
    assert labels_in(rows, model.tokenizer) == labels and labels_of([model]) is None


REFUSED = {
    "one class": ([{"text": f"a{i}", "label": "x"} for i in range(9)],
                  "all rows have the label 'x', wanted 2 to 200 labels"),
    "empty texts": ([*ROWS, {"text": " ", "label": "good"}, {"text": "", "label": "bad"}],
                    "row 25 is an object whose \"text\" is empty (so too row 26); wanted one"),
    "several labels": ([*ROWS, {"text": "a", "label": ["good", "bad"]}],
                       "wanted one label: a word or a whole number"),
    "no label": ([{"text": "a"}], 'has text, which --objective sft learns to write'),
    "answers": ([{"prompt": "a", "completion": "b", "label": True}], "--objective kto learns from"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_rows_are_refused_all_at_once(model, name):
    rows, said = REFUSED[name]
    with pytest.raises(DataError) as caught:
        read(model, rows)
    assert said in str(caught.value), str(caught.value)


def test_held_out_labels_must_be_those_that_are_trained(model, tmp_path):
    with pytest.raises(DataError, match="held out are rows of the labels odd, which no other"):
        read(model, held_out=[{"text": "a", "label": "odd"}, {"text": "b", "label": "good"}])
    (tmp_path / "a.txt").write_text("plain text")
    with pytest.raises(DataError, match="is plain text, which has no labels"):
        read_corpus(tmp_path / "a.txt", model.tokenizer, DataConfig(ctx=48), rows="classes")
    with pytest.raises(ConfigError, match="class_weights names 'odd', wanted some of bad, good"):
        run_of(model, read(model), Classify(class_weights="odd=2")).reserve()
    for word in ("good", "good=0", "good=x", ""):
        with pytest.raises(ConfigError, match="wanted none, balanced or LABEL=N"):
            Classify(class_weights=word)


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_labels_are_words_or_numbers(model, tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    rows = [("a", 0), ("b", 1), ("c", 0), ("d", 1)]
    made = [{"text": text, "label": label} for text, label in rows]
    csv = "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    path.write_text(json.dumps(made) if kind == "json" else csv)
    data = read_corpus(path, model.tokenizer, DataConfig(ctx=48), rows="classes")
    assert Labels.read(data.about["pyggml.labels"]).names == ["0", "1"]
