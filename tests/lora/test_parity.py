"""Every step's loss is that of PyTorch: PEFT's for answers, TRL's for preferences.

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
from pyggml.lora.data import Corpus
from pyggml.lora.data.windows.answers import Answer, Preferences, fill_windows
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.sft import SFT

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
        Answer(list(d), np.arange(len(d)) >= first, wanted=i % 2 == 0)
        for i, (d, first) in enumerate(zip(ids, run["prompts"], strict=True))
    ]
    in_windows = np.split(run["order"], np.cumsum(run["windows"])[:-1])
    return [[answers[i] for i in window] for window in in_windows]


def dataset(windows, ctx, mismatched=None):
    d = fill_windows(windows, ctx)
    return InOrder(d.tokens, d.documents, d.trained, signs=d.signs, mismatched=mismatched)


def losses(run, data, objective):
    """Of every step of a run from the adapter's A and B; the base without them is the reference."""
    wanted = json.loads(str(run["settings"]))
    names = {f.name for f in dataclasses.fields(TrainConfig)} & wanted.keys()
    settings = TrainConfig(compute="f32", **{n: wanted[n] for n in names})
    model = pyggml.load(MODEL, ADAPTER, compute="f32")
    adapter = unfreeze(model)
    events = []
    args = (adapter.model, adapter.parameters, Corpus(data, None), settings, objective)
    trainer = Trainer(*args, reference=model.with_adapters())
    trainer.run(events.append)
    return [e for e in events if isinstance(e, StepReport)]


def preference(kind, run):
    """The objective with the settings of the run."""
    wanted, kind = json.loads(str(run["settings"])), OBJECTIVES[kind]
    names = {f.name for f in dataclasses.fields(kind)} & wanted.keys()
    return kind(**{n: wanted[n] for n in names})


def test_peft_with_masks_over_100_steps():
    run = golden("sft")
    data = dataset(windows_of(run, 48), 48)
    found = [e.loss for e in losses(run, data, SFT())]
    assert len(found) == 100 and run["losses"][-1] < 0.6 * run["losses"][0]
    np.testing.assert_allclose(found, run["losses"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "kind, n_steps", [("dpo", 100), ("orpo", 20), ("kto", 20), ("simpo", 20), ("ipo", 20)]
)
def test_trl(kind, n_steps):
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
    steps = losses(run, dataset(windows, 48, mismatched), preference(kind, run))
    found = [e.loss for e in steps]
    assert len(found) == n_steps
    np.testing.assert_allclose(found, run["losses"], rtol=0, atol=1e-4)
    if kind == "ipo":  # TRL's loss is of means over tokens, its rewards of sums
        return
    for name in ("chosen", "rejected"):
        there = [getattr(e.rewards, f"n_{name}") > 0 for e in steps]
        of_steps = np.array([getattr(e.rewards, name) for e in steps])
        np.testing.assert_allclose(of_steps[there], run[name][there], rtol=0, atol=2e-4)
