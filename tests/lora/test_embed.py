"""Embeddings, trained: groups of texts in windows, InfoNCE by its formula, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import write_llama

import pyggml
from pyggml.errors import AdapterError, ConfigError, DataError
from pyggml.lora import (
    DataConfig,
    LoraConfig,
    TrainConfig,
    Trainer,
    attach,
    corpus,
    merge,
    train_tensors,
)
from pyggml.lora.data import Encoding
from pyggml.lora.data.records.rows import GroupRow, RowPlace
from pyggml.lora.evaluate.groups import find_nearest
from pyggml.lora.objectives.embed import Embed
from pyggml.lora.trainer.validation import _units
from pyggml.models import Inputs

from chats import vocabulary

WORDS = ("alpha", "beta", "gamma", "delta", "rho", "sigma", "tau", "xi")
ROWS = [
    {"anchor": word, "positive": word.upper(), **({"negative": [word[::-1]]} if i % 3 == 0 else {})}
    for i, word in enumerate(WORDS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_llama(path, 270, n_layer=2, seed=1, keys={"llama.context_length": 256})
    model = pyggml.load(path, compute="f32")
    model.__dict__["tokenizer"] = vocabulary()
    return model


def read(model, rows=ROWS, **settings):
    settings = {"ctx": 40, "val_split": 0.0} | settings
    return corpus(rows, model, DataConfig(**settings), purpose="groups")


def run_of(model, data, objective=None, **settings):
    adapter = attach(model, LoraConfig(rank=2))
    p = adapter.parameters.data
    p[:] = np.random.default_rng(0).normal(0, 0.1, p.size)
    settings = {"lr": 0.02, "max_steps": 2, "warmup_steps": 1, "batch": 2} | settings
    args = (adapter.model, adapter.parameters, data, TrainConfig(**settings), objective or Embed())
    return adapter, Trainer(*args)


def vectors_of(model, texts, pooling):
    """In NumPy, of the hidden states that the model gives each text alone."""
    ids = [model.tokenizer.encode(text) for text in texts]
    hidden = [model.embed([each], pooling="none", normalise=False)[0] for each in ids]
    pick = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "cls": lambda h: h[0]}[pooling]
    found = np.stack([pick(h).astype(np.float64) for h in hidden])
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def loss_by_formula(model, batches, pooling, temperature):
    """The mean over all anchors; negatives are those of the batch."""
    total, n = 0.0, 0
    for rows in batches:
        asks = vectors_of(model, [r["anchor"] for r in rows], pooling)
        others = [r["positive"] for r in rows] + [t for r in rows for t in r.get("negative", ())]
        z = asks @ vectors_of(model, others, pooling).T / temperature
        total += (np.log(np.exp(z).sum(1)) - z[np.arange(len(rows)), np.arange(len(rows))]).sum()
        n += len(rows)
    return total / n


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_the_loss_is_the_cross_entropy_of_cosines(model, packing, pooling):
    data = read(model, packing=packing, ctx=30)
    _, trainer = run_of(
        model, data, Embed(temperature=0.2, pooling=pooling), batch=2, grad_accum=8, max_steps=1
    )
    texts = iter(ROWS)
    of_windows = [[next(texts) for _ in range(int(row.sum()))] for row in data.train.targets()]
    order = data.train.order(trainer.config.seed, 0, 16)  # more windows than there are
    if data.train.lengths is not None:
        order = order[np.argsort(data.train.lengths[order], kind="stable")]
    pairs = (order[i : i + 2] for i in range(0, len(order), 2))
    batches = [[row for i in pair for row in of_windows[i]] for pair in pairs]
    wanted = loss_by_formula(trainer.model, batches, pooling, 0.2)
    events = []
    trainer.run(events.append, progress=False)
    assert events[0].loss == pytest.approx(wanted, abs=2e-5)
    assert events[0].n_tokens == 8 == events[0].tally.n_pairs


def test_copies_are_no_negatives(model):
    """Of two rows alike the loss is that of one: either's positive is right for both."""
    objective = Embed(temperature=0.5)
    rows = [*ROWS[1:3], ROWS[1]]
    events = []
    run_of(model, read(model, rows, ctx=60), objective, max_steps=1)[1].run(events.append)
    adapter, _ = run_of(model, read(model), objective)
    a, p, b, q = vectors_of(adapter.model, ["beta", "BETA", "gamma", "GAMMA"], "last")
    first = np.log(1 + np.exp((a @ q - a @ p) / 0.5))
    second = np.log(1 + 2 * np.exp((b @ p - b @ q) / 0.5))
    assert events[0].loss == pytest.approx((2 * first + second) / 3, abs=2e-5)


def test_a_mark_is_not_read_where_tokens_see_both_ways(model):
    data = read(model)
    _, trainer = run_of(model, data)
    (batch, *_) = trainer.losses.feed.batches((), data.train, range(1), None)
    n = len(batch.tokens)
    inputs = replace(Inputs.empty(n), causal=False)
    batch.fill(inputs)
    span = np.array(inputs.span.data)
    last = np.flatnonzero((batch.positions == batch.length - 1) & (batch.length > 0))
    for at in last:
        first = at - batch.positions[at]
        assert (span[first : at + 1] == [first, at + 1]).all(), "the text, without its mark"


def test_texts_that_belong_together_come_near(model, tmp_path):
    adapter, trainer = run_of(model, read(model), Embed(pooling="mean"), max_steps=60)
    places = [RowPlace("f", "row", i + 1) for i in range(len(ROWS))]
    rows = [GroupRow(p, r["anchor"], r["positive"], tuple(r.get("negative", ())))
            for p, r in zip(places, ROWS, strict=True)]  # fmt: skip
    trainer.run(progress=False)
    path = tmp_path / "a.gguf"
    adapter.save(path, trainer.parameters.metadata)
    trained = model.with_adapter_files(path)
    assert trained.adapters[0].pooling == "mean", "as it learned"
    np.testing.assert_array_equal(trained.embed(["alpha"]), trained.embed(["alpha"], "mean"))
    found = find_nearest(trained, rows, Encoding(), 40, False)
    assert found.right["nearest"].all() and found.reciprocal == 1.0
    by_hand = trained.embed(["alpha"]) @ trained.embed(["ALPHA"]).T
    assert found.log_probs[0] == pytest.approx(by_hand[0], abs=1e-5)
    merge(trained, tmp_path / "m.gguf")
    merged = pyggml.load(tmp_path / "m.gguf", compute="f32")
    assert merged.config.pooling == "mean", "as llama.cpp reads it"
    with pytest.raises(DataError, match="row 1 has 5 tokens, wanted at most 4"):
        find_nearest(trained, rows, Encoding(), 4, False)


def test_all_is_trained_but_the_output_matrix(model):
    """Which no vector is made of, unless it is the table of tokens too."""
    unread = Embed().unread(model)
    trained = train_tensors(model, ["*"], unread=unread)
    assert set(model.parts.weights) - set(trained.parameters.tensors) == {"output.weight"}
    assert "output.weight stays: the loss has no slope there" in trained.words
    settings = TrainConfig(max_steps=1, warmup_steps=0, lr=0.01)
    assert Trainer(trained.model, trained.parameters, read(model), settings, Embed()).run()
    with pytest.raises(AdapterError, match=r"output.weight: the loss has no slope there"):
        train_tensors(model, ["output"], unread=unread)


def test_a_group_that_is_too_long_is_cut_or_refused(model):
    rows = [*ROWS, {"anchor": "x" * 50, "positive": "y" * 50, "negative": "z"}]
    with pytest.raises(DataError, match="row 9 has 104 tokens, wanted at most 41"):
        read(model, rows)
    data = read(model, rows, long_chats="truncate")
    assert data.train.n_targets() == 9 and data.files[0].n_truncated == 1
    assert read(model, rows, long_chats="drop").train.n_targets() == 8


REFUSED = {
    "no text": ([{"anchor": "a", "positive": " "}, {"anchor": "", "positive": "b"}],
                'row 1 is an object whose "positive" is empty; row 2 is an object whose "anchor"'),
    "its own": ([{"anchor": "a", "positive": "b", "negative": ["b"]}],
                'whose "negative" has the positive text too'),
    "labels": ([{"text": "a", "label": "b"}], "text and label, which --objective classify learns"),
    "no object": ([{"anchor": "a", "positive": "b", "negative": [3]}], 'whose "negative" is'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_rows_are_refused_all_at_once(model, name):
    rows, said = REFUSED[name]
    with pytest.raises(DataError) as caught:
        read(model, rows)
    assert said in str(caught.value), str(caught.value)


def test_what_is_held_out_is_sampled_by_whole_windows(model):
    data = read(model, val_split=0.5, ctx=60).validation
    assert data.n_targets() > len(data) == len(_units(data)), "several groups in a window"
    assert type(data.part(slice(1))) is type(data)


def test_what_does_not_fit_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="the corpus has no groups of texts"):
        run_of(model, corpus([{"text": "a" * 200}], model, DataConfig(ctx=40)))[1].reserve()
    with pytest.raises(ConfigError, match="pooling is 'max', wanted one of model, mean, cls, last"):
        Embed(pooling="max")
    adapter = attach(model, LoraConfig(rank=2))
    adapter.save(tmp_path / "a.gguf", {"pyggml.pooling": "max"})
    with pytest.raises(
        AdapterError, match="pyggml.pooling is 'max', wanted one of mean, cls, last"
    ):
        model.with_adapter_files(tmp_path / "a.gguf")
