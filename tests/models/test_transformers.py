"""Architectures without a peer against transformers' classes: logits, and gradients of A and B of
every matrix, on files that llama.cpp's converter makes of small models."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from hf_models import as_deviations, convert, logits_and_grads, put_grads, torch_model
from hf_sizes import MODELS, N_TOKENS, N_VOCAB

import pyggml
from pyggml import gguf
from pyggml.lora import LoraConfig, attach, loss_and_grads

from measures import nmse
from peers.trial import wide_modules

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:llama.cpp passes over"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CLASSES = runpy.run_path(Path(__file__).parents[2] / "docs/architectures_table.py")["CLASSES"]
RANK = 4
# 22 layers make much of a rounding: transformers' own of float32 is 9e-9 and 0.01.
LIMITS = {"Gemma3nForCausalLM": (1e-7, 0.05)}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_transformers(name, tmp_path, monkeypatch):
    for module in ("torch", "transformers", "conversion"):
        pytest.importorskip(module)
    tokens = np.random.default_rng(7).integers(0, N_VOCAB, N_TOKENS).astype(np.int32)
    as_deviations(monkeypatch, name)
    theirs = torch_model(name)
    wanted = logits_and_grads(theirs, tokens)
    paths = [tmp_path / "weights", tmp_path / "gradients"]
    model = pyggml.load(convert(theirs, name, paths[0]), compute="f32")
    put_grads(theirs)
    exact = convert(theirs, name, paths[1])
    error = nmse(model.logits(tokens), wanted)
    with gguf.open(exact) as file:
        assert file.get("general.architecture") in CLASSES
        wrong = {
            f"{weight} {which}": e
            for which in "ab"
            for weight, e in errors(model, tokens, file, which)
        }
    worst = max(wrong, key=wrong.get)
    most, most_of_gradients = LIMITS.get(name, (1e-11, 3e-5))
    assert error < most
    assert wrong[worst] < most_of_gradients, worst


def errors(model, tokens, gradients, which):
    """Matrix and relative error of the gradient of A or B, from a file of matrices' gradients."""
    made = adapter(model, which)
    _, grads = loss_and_grads(made.model, tokens)
    for weight, pair in made.pairs.items():
        g = np.reshape(gradients.data(weight), gradients.tensors[weight].shape).astype(np.float64)
        full = (
            pair.b.data.swapaxes(-1, -2) @ g if which == "a" else g @ pair.a.data.swapaxes(-1, -2)
        )
        full *= pair.scale
        found = grads[f"{weight}.lora_{which}"]
        yield weight, np.linalg.norm(found - full) / max(np.linalg.norm(full), 1e-12)


def adapter(model, trained):
    """An adapter of every matrix of which A or B is drawn and the one to train is 0: the model's
    logits do not change."""
    modules = wide_modules(model, RANK, applied=False)
    made = attach(model, LoraConfig(rank=RANK, alpha=2.0 * RANK, modules=modules))
    rng = np.random.default_rng(3)
    for pair in made.pairs.values():
        drawn, zero = (pair.b, pair.a) if trained == "a" else (pair.a, pair.b)
        drawn.data[:], zero.data[:] = rng.standard_normal(drawn.shape), 0
    return made
