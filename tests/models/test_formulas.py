"""Architectures that transformers does not have, against their papers' formulas in float64."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.generation import Session

from measures import nmse
from peers.trial import in_f32, llama_cpp_logits, trained

FORMULAS = Path(__file__).parents[1] / "golden/formulas"
FILES = sorted(FORMULAS.glob("*.gguf"))
TOKENS = np.random.default_rng(0).integers(0, 40, 24)  # as the files' makers have them


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_logits(file):
    found = pyggml.load(file, compute="f32").logits(TOKENS)
    assert nmse(found, np.load(file.with_suffix(".npy"))) < 1e-11


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_a_cache_changes_nothing(file):
    model = pyggml.load(file, compute="f32")
    session, wanted = Session(model, 24), model.logits(TOKENS)
    for first, last in ((0, 9), (9, 10), (10, 17), (17, 24)):
        found = session.feed(TOKENS[first:last])
        assert nmse(found, wanted[last - 1]) < 1e-11


@pytest.mark.interop
@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_llama_cpp_has_the_same_logits(file, tmp_path):
    found = llama_cpp_logits(in_f32(file, tmp_path / "f32.gguf"), TOKENS)
    assert nmse(found, np.load(file.with_suffix(".npy"))) < 1e-10


@pytest.mark.interop
@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_llama_cpp_has_the_same_logits_with_our_adapter(file, tmp_path):
    """On every matrix that it looks updates up for, the token embedding and the output included."""
    model = pyggml.load(in_f32(file, tmp_path / "f32.gguf"), compute="f32")
    before = model.logits(TOKENS)
    modules = (*model.parts.decoder.modules, "token_embd", "output")
    adapter = trained(model, modules=modules)
    adapter.save(tmp_path / "adapter.gguf")
    ours = adapter.model.logits(TOKENS)
    assert nmse(ours, before) > 0.1, "the adapter does next to nothing"
    found = llama_cpp_logits(tmp_path / "f32.gguf", TOKENS, tmp_path / "adapter.gguf")
    assert nmse(found, ours) < 1e-10
