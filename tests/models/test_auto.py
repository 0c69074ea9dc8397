"""What rounding to bfloat16 costs, on whole models; where the CPU lacks it, it is emulated."""

import numpy as np
import pytest

import pyggml
from pyggml.lora import loss_and_grads

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]
EXACT = {"F16": "f32_hf", "Q8_0": "Q8_0_exact", "Q4_K_M": "Q4_K_M_exact"}


@pytest.fixture(autouse=True)
def bf16(monkeypatch):
    monkeypatch.setattr("pyggml.model.FASTEST", "bf16")


@pytest.mark.parametrize("kind", list(EXACT))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(architecture, kind, golden_file, golden):
    model = pyggml.load(golden_file(f"{architecture}-{kind}.gguf"))
    wanted = golden(architecture)
    exact = wanted[EXACT[kind]]
    found = model.logits(wanted["tokens"])[wanted["rows"]]
    error = ((found - exact) ** 2).sum() / (exact**2).sum()
    assert 1e-10 < error < 1e-4, "rounded, and not too much"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients(architecture, golden_file, golden):
    adapter = golden_file(f"{architecture}-lora.gguf")
    model = pyggml.load(golden_file(f"{architecture}-F16.gguf"), adapter)
    wanted = golden(architecture)
    loss, grads = loss_and_grads(model, wanted["tokens"])
    assert loss == pytest.approx(float(wanted["lora_loss"]), abs=1e-2)
    for name, found in grads.items():
        exact = wanted[f"grad/{name}"]
        cosine = (found * exact).sum() / (np.linalg.norm(found) * np.linalg.norm(exact))
        assert cosine > 0.999, name
