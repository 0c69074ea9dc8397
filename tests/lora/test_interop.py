"""llama.cpp loads an adapter that was trained here, and gives the same logits with it."""

import numpy as np
import pytest

import pyggml
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.data import Corpus, Dataset

pytestmark = pytest.mark.interop
GOLDEN = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"]
GOLDEN += ["granite", "lfm2", "mamba", "olmo2", "phi3", "smollm3"]


def trained(path, ctx=32, steps=12):
    """A model with an adapter that was trained hard on random tokens."""
    model = pyggml.load(path, compute="f32")
    adapter = attach(model, LoraConfig(rank=4, alpha=10.0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 400, (steps, ctx + 1)).astype(np.int32)
    corpus = Corpus(Dataset(tokens, np.zeros_like(tokens)), None)
    config = TrainConfig(ctx=ctx, lr=0.02, warmup_steps=0, lr_scheduler="constant", compute="f32")
    Trainer(model, adapter.parameters, corpus, config).run()
    return model, adapter


def llama_cpp_logits(path, tokens, adapter=None):
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(
        model_path=str(path),
        lora_path=adapter and str(adapter),
        n_ctx=len(tokens),
        logits_all=True,
        type_k=0,  # F32
        type_v=0,
        flash_attn=False,
        verbose=False,
    )
    llama.eval([int(t) for t in tokens])
    return np.array(llama.scores[: len(tokens)])


def nmse(found, want):
    return np.mean((found - want) ** 2) / np.mean((want - want.mean()) ** 2)


@pytest.mark.parametrize("arch", GOLDEN)
def test_llama_cpp_gives_our_logits_with_our_adapter(shared, tmp_path, arch):
    path = shared / "fixtures" / f"{arch}-F16.gguf"
    tokens = np.load(shared / "fixtures" / f"{arch}-golden.npz")["tokens"]
    model, adapter = trained(path)
    adapter.save(tmp_path / "adapter.gguf")
    ours, base = model.logits(tokens), pyggml.load(path, compute="f32").logits(tokens)
    theirs = llama_cpp_logits(path, tokens, tmp_path / "adapter.gguf")
    assert nmse(ours, base) > 0.1, "the adapter does next to nothing"
    assert nmse(theirs, ours) < 1e-5
