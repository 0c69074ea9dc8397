"""Training of all tensors: PyTorch's losses, the same bits however it is run, and llama.cpp."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import NO_VOCABULARY, write_llama

import pyggml
from pyggml.errors import AdapterError
from pyggml.lora import StepReport, TrainConfig, Trainer, train_tensors
from pyggml.lora.data import Corpus, Dataset

from peers.trial import llama_cpp_logits
from runs import state

GOLDEN = Path(__file__).parents[1] / "golden/training/full.npz"


class InOrder(Dataset):
    """Windows that are read as they stand."""

    def order(self, seed, epoch, step=1):
        return np.arange(len(self))


@pytest.fixture(scope="module")
def golden():
    """Of tests/golden/training/make_full.py."""
    with np.load(GOLDEN) as found:
        return dict(found)


def trainer_of(path, golden, optimiser, n_steps=None, **more):
    """A run of all tensors as the golden ones, or of their first windows."""
    settings = json.loads(str(golden["settings"]))[optimiser] | more
    n = settings["batch"] * (n_steps or settings["max_steps"]) * settings.get("grad_accum", 1)
    settings["max_steps"] = n_steps or settings["max_steps"]
    trained = train_tensors(pyggml.load(path, compute="f32"), ["*"])
    ids = golden["ids"][:n].astype(np.int32) % trained.model.config.n_vocab
    data = Corpus(InOrder(ids, np.zeros_like(ids)), None)
    return trained, Trainer(trained.model, trained.parameters, data, TrainConfig(**settings))


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_losses_are_pytorch_s_over_100_steps(shared, golden, architecture, optimiser):
    path = shared / f"fixtures/{architecture}-F16.gguf"
    _, trainer = trainer_of(path, golden, optimiser)
    events = []
    trainer.run(events.append, progress=False)
    found = [e.loss for e in events if isinstance(e, StepReport)]
    wanted = golden[f"{architecture}/{optimiser}"]
    assert len(found) == 100 and wanted[-1] < 0.2 * wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_a_resumed_run_and_any_number_of_threads_make_the_same_bits(
    tiny, golden, tmp_path, optimiser
):
    _, whole = trainer_of(tiny, golden, optimiser, 6, threads=2)
    whole.run(progress=False)
    checkpoints = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 3}
    _, first = trainer_of(tiny, golden, optimiser, 6, threads=1, **checkpoints)
    first.run(lambda event: first.stop() if first.progress.step == 3 else None, progress=False)
    _, second = trainer_of(tiny, golden, optimiser, 6, threads=1)
    second.resume(tmp_path)
    assert second.progress.step == 3
    second.run(progress=False)
    assert state(second) == state(whole)


def test_constants_stay_and_are_named(shared):
    model = pyggml.load(shared / "fixtures/llama-F16.gguf")
    trained = train_tensors(model, ["*"])
    assert len(trained.parameters.tensors) == len(model.parts.weights) - 1
    assert trained.words[1] == "rope_freqs.weight stays: no loss has a slope there"
    with pytest.raises(AdapterError, match=r"rope_freqs.weight: no loss has a slope"):
        train_tensors(model, ["rope_freqs"])


@pytest.mark.interop
def test_llama_cpp_has_our_perplexity_of_the_file(golden, tmp_path):
    told = NO_VOCABULARY | {"llama.vocab_size": 64}
    base = write_llama(tmp_path / "base.gguf", n_vocab=64, n_layer=2, seed=1, keys=told)
    trained, trainer = trainer_of(base, golden, "adamw", 20, lr=5e-3)
    trainer.run(progress=False)
    trained.save(tmp_path / "full.gguf")
    tokens = golden["ids"][150].astype(np.int32)
    ours, before = (
        perplexity(pyggml.load(path, compute="f32").logits(tokens), tokens)
        for path in (tmp_path / "full.gguf", base)
    )
    theirs = perplexity(llama_cpp_logits(tmp_path / "full.gguf", tokens), tokens)
    assert ours < 0.5 * before
    assert theirs == pytest.approx(ours, rel=1e-4)


def perplexity(logits, tokens):
    """Of all tokens but the first."""
    x = logits[:-1].astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return float(np.exp(-log_p[np.arange(len(x)), tokens[1:]].mean()))
