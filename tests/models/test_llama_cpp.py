"""Architectures that have no peer: llama.cpp's logits of the models of `llama_models`."""

import numpy as np
import pytest
from gelu_table import GeluTable
from llama_models import (
    GELUS,
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

NAMES = sorted(p.stem for p in GOLDEN.glob("*.npz"))
each = pytest.mark.parametrize("name", NAMES, scope="module")  # a model is written once


@pytest.fixture(scope="module")
def model(name, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return pyggml.load(write(path, *VARIANTS[name]), compute="f32")


@pytest.fixture(scope="module")
def values(name):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


@each
def test_logits(name, model, values):
    assert nmse(model.logits(tokens_of(name))[-N_TOKENS:], values["logits"]) < LIMITS[name]


@each
def test_logits_with_an_adapter(name, model, values):
    found = with_adapter(model).model.logits(tokens_of(name))[-N_TOKENS:]
    assert nmse(found, values["lora_logits"]) < LIMITS[name]
    assert nmse(found, values["logits"]) > 1e-3, "the adapter changes something"


@each
def test_logits_with_an_adapter_that_llama_cpp_reads_merged(name, model, values):
    """Its updates of latent matrices count there after a merge."""
    assert ("merged_logits" in values) is passes_over(model)
    if not passes_over(model):
        return
    found = with_adapter(model, applied=False).model.logits(tokens_of(name))
    assert nmse(found, values["merged_logits"]) < LIMITS[name]
    assert nmse(found, values["lora_logits"]) > 1e-3, "latent matrices change something"


@each
def test_a_cache_changes_nothing(name, model, values):
    tokens = tokens_of(name)
    before = len(tokens) - N_TOKENS
    session = Session(model, len(tokens))
    for n in (before + 7, 1, 9, 1, 6):
        found = session.feed(tokens[session.n_past : session.n_past + n])
        assert nmse(found, values["logits"][session.n_past - 1 - before]) < LIMITS[name]
    assert session.n_past == len(tokens)


@pytest.mark.filterwarnings("ignore:table leaves")
@pytest.mark.parametrize("name", sorted(GELUS), scope="module")
def test_behind_gelus_it_is_the_table_that_differs(name, values, tmp_path):
    """With GELUs rounded as llama.cpp's are, as little is left as elsewhere. An adapter's rounding
    takes a few arguments to the next half."""
    path, tokens = write(tmp_path / "model.gguf", *VARIANTS[name]), tokens_of(name)
    model = pyggml.load(path, compute="f32", backends=(GeluTable(),))
    left = nmse(model.logits(tokens), values["logits"])
    without = nmse(pyggml.load(path, compute="f32").logits(tokens), values["logits"])
    adapted = nmse(with_adapter(model).model.logits(tokens), values["lora_logits"])
    assert left < 2e-10
    assert without > 100 * left, "else the table is not the cause"
    assert adapted < 1e-8


@each
@pytest.mark.interop
def test_the_golden_files_are_llama_cpp_s(name, values, tmp_path):
    found = golden(name, tmp_path)
    for key, wanted in values.items():
        np.testing.assert_allclose(found[key], wanted, rtol=1e-4, atol=1e-5, err_msg=key)
