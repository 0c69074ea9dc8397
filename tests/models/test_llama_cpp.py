"""Architectures that have no peer: llama.cpp's logits of the models of `llama_models`."""

import numpy as np
import pytest
from llama_models import (
    GOLDEN,
    LIMITS,
    N_TOKENS,
    VARIANTS,
    golden,
    passes_over,
    tokens_of,
    with_adapter,
    write,
)

import pyggml
from pyggml.generation import Session

from measures import nmse

pytestmark = pytest.mark.parametrize("name", sorted(p.stem for p in GOLDEN.glob("*.npz")))


@pytest.fixture
def model(name, tmp_path):
    return pyggml.load(write(tmp_path / "model.gguf", *VARIANTS[name]), compute="f32")


@pytest.fixture
def values(name):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def test_logits(name, model, values):
    assert nmse(model.logits(tokens_of(name))[-N_TOKENS:], values["logits"]) < LIMITS[name]


def test_logits_with_an_adapter(name, model, values):
    found = with_adapter(model).model.logits(tokens_of(name))[-N_TOKENS:]
    assert nmse(found, values["lora_logits"]) < LIMITS[name]
    assert nmse(found, values["logits"]) > 1e-3, "the adapter changes something"


def test_logits_with_an_adapter_that_llama_cpp_reads_merged(name, model, values):
    """Its updates of latent matrices count there after a merge."""
    assert ("merged_logits" in values) is passes_over(model)
    if not passes_over(model):
        return
    found = with_adapter(model, applied=False).model.logits(tokens_of(name))
    assert nmse(found, values["merged_logits"]) < LIMITS[name]
    assert nmse(found, values["lora_logits"]) > 1e-3, "latent matrices change something"


def test_a_cache_changes_nothing(name, model, values):
    tokens = tokens_of(name)
    before = len(tokens) - N_TOKENS
    session = Session(model, len(tokens))
    for n in (before + 7, 1, 9, 1, 6):
        found = session.feed(tokens[session.n_past : session.n_past + n])
        assert nmse(found, values["logits"][session.n_past - 1 - before]) < LIMITS[name]
    assert session.n_past == len(tokens)


@pytest.mark.interop
def test_the_golden_files_are_llama_cpp_s(name, values, tmp_path):
    found = golden(name, tmp_path)
    for key, wanted in values.items():
        np.testing.assert_allclose(found[key], wanted, rtol=1e-4, atol=1e-5, err_msg=key)
