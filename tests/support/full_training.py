"""Training of all tensors over the windows of tests/golden/training/full.npz, whose losses are
PyTorch's."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.lora import TrainConfig, Trainer, train_packed, train_tensors
from pyggml.lora.data import Corpus, Dataset

from runs import steps

TESTS = Path(__file__).parents[1]
# What PyTorch has trained.
OPTIMISERS = ("adamw", "sgd")
FULL = (
    "qwen3",
    "phi3",
    "mistral",
    "llama",
    "qwen2",
    "gpt2",
    "lfm2",
    "gemma2",
    "gemma3",
    "qwen3moe",
)


class InOrder(Dataset):
    """Windows that are read as they stand."""

    def order(self, seed, epoch, step=1):
        return np.arange(len(self))


@cache
def golden():
    """Of tests/golden/training/make_full.py."""
    with np.load(TESTS / "golden/training/full.npz") as arrays:
        return dict(arrays)


def model_of(architecture):
    """The file that PyTorch trained; skips where neither this clone nor ../shared has it: nine of
    the ten, of 38 MB together, are no part of a clone."""
    name = f"{architecture}-F16.gguf"
    for folder in (TESTS / "golden/models", TESTS / "../../shared/fixtures"):
        if (folder / name).exists():
            return folder / name
    return pytest.skip(f"../shared/fixtures/{name} is not there")


def trainer_of(
    path, optimiser, n_steps=None, backends=(), ctx=32, in_halves=False, compute="f32", **more
):
    """What is trained, and a run of it with the golden settings, or of its first steps. Optimisers
    that PyTorch has not trained with take AdamW's."""
    golden_settings = json.loads(str(golden()["settings"]))
    others = golden_settings["adamw"] | {"optimiser": optimiser}
    settings = golden_settings.get(optimiser, others) | more
    n = settings["batch"] * (n_steps or settings["max_steps"]) * settings.get("grad_accum", 1)
    settings["max_steps"] = n_steps or settings["max_steps"]
    model = pyggml.load(path, compute=compute, backends=backends)
    trained = train_tensors(model, ["*"], in_halves)
    ids = golden()["ids"][:n, : ctx + 1].astype(np.int32) % trained.model.config.n_vocab
    data = Corpus(InOrder(ids, np.zeros_like(ids)), None)
    return trained, Trainer(trained.model, trained.parameters, data, TrainConfig(**settings))


def losses(architecture, optimiser, n_steps=100, backends=()):
    """(n_steps,) losses, each before its update, of the beginning of the golden run."""
    _, trainer = trainer_of(model_of(architecture), optimiser, backends=backends)
    events = []

    def listen(report):
        events.append(report)
        if len(steps(events)) == n_steps:
            trainer.stop()

    trainer.run(listen, progress=False)
    return np.array([step.loss for step in steps(events)])


def check_losses(architecture, optimiser, n_steps=100, backends=(), within=1e-4):
    """AssertionError unless the golden run begins with PyTorch's losses."""
    wanted = golden()[f"{architecture}/{optimiser}"][:n_steps]
    found = losses(architecture, optimiser, n_steps, backends)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=within)


def packed_losses(path, backends=(), n_steps=4):
    """(n_steps,) losses of training what blocks of Q4_0 hold."""
    trained = train_packed(pyggml.load(path, compute="f32", backends=backends), ["*"], "Q4_0")
    ids = golden()["ids"][:n_steps].astype(np.int32) % trained.model.config.n_vocab
    data = Corpus(InOrder(ids, np.zeros_like(ids)), None)
    # By AdamW the first step is a gradient's sign, which rounding changes where it is near 0.
    config = TrainConfig(optimiser="sgd", lr=0.5, batch=1, warmup_steps=0)
    trainer = Trainer(trained.model, trained.parameters, data, config)
    trainer.run(progress=False)
    return trainer.history.losses
