"""llama.cpp loads an adapter that was trained here, and gives the same logits with it."""

import numpy as np
import pytest

import pyggml

from measures import nmse
from peers.trial import in_f32, llama_cpp_logits, trained

pytestmark = pytest.mark.interop
GOLDEN = ["llama", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt2"]
GOLDEN += ["granite", "lfm2", "mamba", "olmo2", "phi3", "smollm3"]


@pytest.mark.parametrize("arch", GOLDEN)
def test_llama_cpp_gives_our_logits_with_our_adapter(shared, tmp_path, arch):
    path = shared / "fixtures" / f"{arch}-F16.gguf"
    tokens = np.load(shared / "fixtures" / f"{arch}-golden.npz")["tokens"]
    model = pyggml.load(path, compute="f32")
    adapter = trained(model)
    adapter.save(tmp_path / "adapter.gguf")
    ours, base = adapter.model.logits(tokens), pyggml.load(path, compute="f32").logits(tokens)
    if "moe" in arch:  # halves of activations would choose other experts where two are close
        path = in_f32(path, tmp_path / "f32.gguf")
    theirs = llama_cpp_logits(path, tokens, tmp_path / "adapter.gguf")
    assert nmse(ours, base) > 0.1, "the adapter does next to nothing"
    assert nmse(theirs, ours) < 1e-5
