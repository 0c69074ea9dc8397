"""Architectures against transformers' classes and llama.cpp, on the small models of `peers`."""

import json

import numpy as np
import pytest

import pyggml
from pyggml.generation import Session
from pyggml.lora import loss_and_grads

from measures import nmse
from peers import PEERS, golden
from peers.files import GOLDEN, save
from peers.trial import adapted, in_f32, llama_cpp_logits, trained, wide_modules

BF16 = json.loads((GOLDEN / "bf16.json").read_text())
pytestmark = pytest.mark.parametrize("name", list(PEERS))


@pytest.fixture
def model(name):
    return pyggml.load(GOLDEN / f"{name}.gguf", compute="f32")


@pytest.fixture
def values(name):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def test_logits(model, values):
    assert nmse(model.logits(values["tokens"]), values["logits"]) < 1e-10


def test_logits_with_an_adapter(model, values):
    model = adapted(model, values)
    found = model.logits(values["tokens"])
    assert nmse(found, values["lora_logits"]) < 1e-10
    assert nmse(found, values["logits"]) > 1e-3, "the adapter changes something"


def test_gradients_of_an_adapter(model, values):
    model = adapted(model, values)
    loss, grads = loss_and_grads(model, values["tokens"])
    assert loss == pytest.approx(float(values["lora_loss"]), rel=1e-6)
    for name, g in grads.items():
        exact = values[f"grad/{name}"]
        assert np.linalg.norm(exact) > 1e-5, f"{name} is trained"
        assert np.linalg.norm(g - exact) < 1e-4 * np.linalg.norm(exact), name


def test_a_cache_changes_nothing(name, model, values):
    """But for the factors of a beginning that is short, where those of the whole are long."""
    tokens = values["tokens"]
    session, whole = Session(model, len(tokens)), values["logits"]
    for n in (7, 1, 1, 12, 1, 1, 1):
        found = session.feed(tokens[session.n_past : session.n_past + n])
        if name != "phi3-long" or session.n_past > 16:
            assert nmse(found, whole[session.n_past - 1]) < 1e-10
    assert session.n_past == len(tokens)


def test_how_far_bfloat16_is(name, values):
    """The table is a measure for cards; random weights are harder to round than trained ones."""
    allowed = {what: 2 * error for what, error in BF16[name].items()}
    model = pyggml.load(GOLDEN / f"{name}.gguf", compute="bf16")
    assert nmse(model.logits(values["tokens"]), values["logits"]) < allowed["logits"]
    _, grads = loss_and_grads(adapted(model, values), values["tokens"])
    found, exact = (
        np.concatenate([of(key).ravel() for key in grads])
        for of in (grads.get, lambda key: values[f"grad/{key}"])
    )
    assert np.linalg.norm(found - exact) < allowed["gradients"] * np.linalg.norm(exact)


# -- the others ---------------------------------------------------------------------------------


@pytest.mark.interop
def test_the_golden_files_are_pytorch_s(name, values, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    arrays, found = golden(PEERS[name])
    path = save(tmp_path, PEERS[name], (arrays, found))
    assert path.read_bytes() == (GOLDEN / path.name).read_bytes()
    assert found.keys() == values.keys()
    for key, wanted in values.items():
        np.testing.assert_allclose(found[key], wanted, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.interop
def test_llama_cpp_agrees_with_and_without_our_adapter(name, model, values, tmp_path):
    """What is left is its table of GELUs in halves, at most."""
    if PEERS[name].not_in_llama_cpp:
        pytest.skip(f"llama.cpp: {PEERS[name].not_in_llama_cpp}")
    tokens = values["tokens"]
    path = in_f32(GOLDEN / f"{name}.gguf", tmp_path / "model.gguf")
    assert nmse(llama_cpp_logits(path, tokens), values["logits"]) < 1e-6
    adapter = trained(model, modules=wide_modules(model, 4))
    adapter.save(tmp_path / "adapter.gguf")
    ours = adapter.model.logits(tokens)
    assert nmse(ours, values["logits"]) > 1e-2, "the adapter does next to nothing"
    assert nmse(llama_cpp_logits(path, tokens, tmp_path / "adapter.gguf"), ours) < 1e-6
