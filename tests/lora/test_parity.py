"""The losses of steps are those of PyTorch: PEFT's for answers, TRL's for preferences and rewards.

The runs are in tests/golden/training, with the script that made them: from the same A and B, with
alpha other than the rank, weight decay, clipping, accumulation, warm-up and masks.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.lora import (
    StepReport,
    TrainConfig,
    Trainer,
    unfreeze,
)
from pyggml.lora.data import Corpus, PromptRow, RowPlace
from pyggml.lora.data.labels import Labels
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.data.windows.answers import Answer, Preferences, fill_windows
from pyggml.lora.data.windows.batches import READS, no_documents
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.classify import Classify
from pyggml.lora.objectives.embed import Embed
from pyggml.lora.objectives.rewarded import RewardObjective
from pyggml.lora.objectives.sft import SFT
from pyggml.lora.rollouts.sampling import GroupSampler, SampledAnswer
from pyggml.models.stack import LABELS

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL, ADAPTER = (GOLDEN / f"models/qwen3-{part}.gguf" for part in ("F16", "lora"))


class InOrder(Preferences):
    """Windows that are read as they stand."""

    def order(self, seed, epoch, step=1):
        return np.arange(len(self))


def golden(objective):
    with np.load(GOLDEN / f"training/{objective}.npz") as found:
        return dict(found)


def windows_of(run, ctx, numbers=None):
    """The documents of each window, in order; odd ones count as not wanted."""
    ends = np.cumsum(run["lengths"])
    ids = np.split(run["ids"].astype(np.int32), ends[:-1])
    answers = [
        Answer(list(d), np.arange(len(d)) >= first, is_wanted=i % 2 == 0)
        for i, (d, first) in enumerate(zip(ids, run["prompts"], strict=True))
    ]
    in_windows = np.split(run["order"], np.cumsum(run["windows"])[:-1])
    return [[answers[i] for i in window] for window in in_windows]


def dataset(windows, ctx, mismatched=None):
    d = fill_windows(windows, ctx)
    return InOrder(d.tokens, d.documents, d.trained, signs=d.signs, mismatched=mismatched)


def losses(run, data, objective, about=None, n_steps=30):
    """Of so many steps of a run, which may have more, from the adapter's A and B; the base without
    them is the reference."""
    wanted = json.loads(str(run["settings"]))
    names = {f.name for f in dataclasses.fields(TrainConfig)} & wanted.keys()
    settings = TrainConfig(compute="f32", **{n: wanted[n] for n in names})
    model = pyggml.load(MODEL, ADAPTER, compute="f32")
    adapter = unfreeze(model)
    steps = []

    def listen(event):
        if isinstance(event, StepReport):
            steps.append(event)
            if len(steps) == n_steps:
                trainer.stop()

    args = (
        adapter.model,
        adapter.parameters,
        Corpus(data, None, about=about or {}),
        settings,
        objective,
    )
    trainer = Trainer(*args, reference=model.with_adapters())
    trainer.run(listen)
    return steps


def agree(found, run, atol=1e-4):
    """The losses are those of the run's first steps."""
    np.testing.assert_allclose(found, run["losses"][: len(found)], rtol=0, atol=atol)


def preference(kind, run, **more):
    """The objective with the settings of the run."""
    wanted, kind = json.loads(str(run["settings"])), OBJECTIVES[kind]
    names = {f.name for f in dataclasses.fields(kind)} & wanted.keys()
    return kind(**{n: wanted[n] for n in names}, **more)


def test_classes():
    """As torch's weighted cross entropy of the labels' logits trains."""
    run, labels = golden("classify"), {"a": 7, "b": 11, "c": 13}
    weights = json.loads(str(run["settings"]))["class_weights"]
    words = ",".join(f"{name}={w}" for name, w in zip(labels, weights, strict=True))
    data, about = dataset(windows_of(run, 48), 48), {LABELS: Labels(labels).text()}
    found = [e.loss for e in losses(run, data, Classify(class_weights=words), about)]
    assert run["losses"][-1] < 0.01 * run["losses"][0]
    agree(found, run)


def test_embeddings():
    """As torch's cross entropy of the batch's cosines trains."""
    run = golden("embed")
    settings = json.loads(str(run["settings"]))
    objective = Embed(temperature=settings["temperature"], pooling=settings["pooling"])
    d = dataset(windows_of(run, 48), 48)
    d = dataclasses.replace(d, trained=d.trained & (d.tokens == 0))
    found = [e.loss for e in losses(run, d, objective, {READS: "groups"})]
    assert run["losses"][-1] < 0.1 * run["losses"][0]
    agree(found, run)


def test_peft_with_masks_over_100_steps():
    run = golden("sft")
    data = dataset(windows_of(run, 48), 48)
    found = [e.loss for e in losses(run, data, SFT(), n_steps=100)]
    assert len(found) == 100 and run["losses"][-1] < 0.6 * run["losses"][0]
    agree(found, run)


def test_a_teacher():
    """PyTorch's own KL over a teacher's likeliest tokens and all others together."""
    run = golden("distill")
    objective = dataclasses.replace(preference("distill", run), teacher=str(MODEL))
    found = [e.loss for e in losses(run, dataset(windows_of(run, 48), 48), objective)]
    assert run["losses"][-1] < 0.8 * run["losses"][0]
    agree(found, run)


@pytest.mark.parametrize("kind", ["dpo", "orpo", "kto", "simpo", "ipo"])
def test_trl(kind):
    run = golden(kind)
    windows = windows_of(run, 48)
    mismatched = None
    if kind == "kto":  # TRL moves completions on within a batch, which is two windows here
        batches = [windows[i] + windows[i + 1] for i in range(0, len(windows), 2)]
        moved = [
            [b.after_prompt_of(a) for a, b in zip(batch, batch[-1:] + batch, strict=False)]
            for batch in batches
        ]
        mismatched = fill_windows([part for m in moved for part in (m[:2], m[2:])], 48)
    data = dataset(windows, 48, mismatched)
    steps = losses(run, data, preference(kind, run), n_steps=20)
    agree([e.loss for e in steps], run)
    if kind == "ipo":  # TRL's loss is of means over tokens, its rewards of sums
        return
    for name in ("chosen", "rejected"):
        there = [getattr(e.rewards, f"n_{name}") > 0 for e in steps]
        of_steps = np.array([getattr(e.rewards, name) for e in steps])
        wanted = run[name][:20]
        np.testing.assert_allclose(of_steps[there], wanted[there], rtol=0, atol=2e-4)


class InOrderPrompts(Prompts):
    """Prompts that are read as they stand."""

    def order(self, seed, epoch, step=1):
        return np.arange(len(self))


def prompts_of(prompts, ctx):
    """A dataset of these, each with a row that is its tokens."""
    rows = [PromptRow(RowPlace("golden", "window", i), tuple(p.tolist())) for i, p in
            enumerate(prompts)]  # fmt: skip
    tokens = np.zeros((len(prompts), ctx + 1), np.int32)
    documents = np.tile(no_documents(ctx + 1), (len(prompts), 1))
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], documents[i, : len(prompt)] = prompt, i
    return InOrderPrompts(tokens, documents, rows=np.array(rows, object))


def log_probs(logits, ids, temperature):
    """Of each token but the first, float64; logits (n, n_vocab)."""
    z = logits.astype(np.float64)[:-1] / temperature
    z -= z.max(axis=1, keepdims=True)
    return (z - np.log(np.exp(z).sum(axis=1, keepdims=True)))[np.arange(len(z)), ids[1:]]


def test_trl_with_a_teacher(monkeypatch):
    """TRL's generalised Jensen-Shannon loss, of the same answers as if they had been sampled."""
    run = golden("gkd")
    answers = [np.array(a.ids, np.int32) for (a,) in windows_of(run, 48)]
    prompts = [ids[:n] for ids, n in zip(answers, run["prompts"], strict=True)]
    assert len({p.tobytes() for p in prompts}) == len(prompts)
    of_prompt = {p.tobytes(): a[len(p) :] for p, a in zip(prompts, answers, strict=True)}

    def sample(sampler, prompt, seeds):
        ids = of_prompt[prompt.tobytes()]
        return [SampledAnswer(ids, np.zeros(len(ids), np.float32), True)]

    monkeypatch.setattr(GroupSampler, "sample", sample)
    monkeypatch.setattr(OBJECTIVES["gkd"], "about", lambda *given: {})
    objective = preference("gkd", run, teacher=str(MODEL))
    found = [e.loss for e in losses(run, prompts_of(prompts, 48), objective)]
    assert run["losses"][-1] < 0.1 * run["losses"][0]
    agree(found, run, 2e-6)  # of 7e-4 and less


REWARDED = [name for name, kind in OBJECTIVES.items() if issubclass(kind, RewardObjective)]


@pytest.mark.parametrize("kind", REWARDED)
def test_trl_with_rewards(monkeypatch, kind):
    """Of the same answers, as if they had been sampled, at temperatures below and above 1, with a
    KL; each lesson is that of two steps, so that ratios are clipped in every second one."""
    run = golden(kind)
    temperature = json.loads(str(run["settings"]))["temperature"]
    groups = windows_of(run, 48)
    prompts = [np.array(group[0].ids, np.int32)[~group[0].trained] for group in groups]
    answers = [np.array(a.ids, np.int32) for group in groups for a in group]
    earned = {tuple(a.tolist()): float(x) for a, x in zip(answers, run["rewards"], strict=True)}

    def sample(sampler, prompt, seeds):
        (i,) = [i for i, each in enumerate(prompts) if np.array_equal(each, prompt)]
        n, batch = len(prompt), sampler._batch
        of_slots = {batch.open(): a for a in answers[4 * i : 4 * i + 4]}
        logits = batch.feed(of_slots, every=of_slots)
        for slot in of_slots:
            slot.close()
        return [
            SampledAnswer(a[n:], log_probs(logits[slot], a, temperature)[n - 1 :], True)
            for slot, a in of_slots.items()
        ]

    monkeypatch.setattr(GroupSampler, "sample", sample)
    monkeypatch.setattr(SampledAnswer, "text", lambda answer, model: tuple(answer.ids.tolist()))
    monkeypatch.setattr(OBJECTIVES[kind], "about", lambda *given: {})
    objective = preference(
        kind, run, reward=(lambda prompt, completion: earned[prompt + completion],)
    )
    steps = losses(run, prompts_of(prompts, 48), objective)
    assert sum(e.tally.n_clipped for e in steps) > 5 and sum(e.tally.kl_sum for e in steps) > 0
    agree([e.loss for e in steps], run)
