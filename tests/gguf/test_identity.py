"""A model is told from another by every tensor, type, shape and value that numbers depend on."""

import warnings

import numpy as np
import pytest
from tiny_models import TOKENS, VOCABULARY, write_llama

import pyggml
from pyggml import gguf
from pyggml.gguf.identity import Identity, identity
from pyggml.lora import LoraConfig, attach


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_llama(path, len(TOKENS), n_layer=2, seed=5, keys=VOCABULARY)


def parts_of(path):
    with gguf.open(path) as file:
        metadata = {key: field.value for key, field in file.metadata.items()}
        tensors = [(n, t.dtype, t.shape, file.data(n).copy()) for n, t in file.tensors.items()]
    return dict(metadata), tensors


def identity_of(path):
    with gguf.open(path) as file:
        return identity(file)


@pytest.mark.quick
def test_a_change_of_any_one_tensor_makes_another_model(model, tmp_path):
    own, (metadata, tensors) = identity_of(model), parts_of(model)
    seen = {own}
    for name, _, _, array in tensors:
        before = array.copy()
        array.reshape(-1)[:] *= np.float32(1.001)
        gguf.write(tmp_path / "changed.gguf", metadata, tensors)
        other = identity_of(tmp_path / "changed.gguf")
        assert own.difference(other) == "has other weights under the same names", name
        seen.add(other)
        array[:] = before
    assert len(seen) == 1 + len(tensors)


@pytest.mark.quick
def test_what_changes_no_number_changes_no_identity(model, tmp_path):
    own, (metadata, tensors) = identity_of(model), parts_of(model)
    renamed = metadata | {"general.name": "another", "tokenizer.chat_template": "{{ messages }}"}
    gguf.write(tmp_path / "same.gguf", renamed, tensors[::-1])
    assert identity_of(tmp_path / "same.gguf") == own == Identity.of(str(own))
    changed = metadata | {"llama.rope.freq_base": np.float32(5.0)}
    gguf.write(tmp_path / "other.gguf", changed, tensors)
    assert own.difference(identity_of(tmp_path / "other.gguf")).startswith("has other hyperparam")
    gguf.write(tmp_path / "fewer.gguf", metadata, tensors[:-1])
    assert own.difference(identity_of(tmp_path / "fewer.gguf")).startswith("has other tensors")
    assert Identity.of("16 bytes, 00ff") is None is Identity.of(3)


def test_an_adapter_says_so_where_its_base_is_another_model(model, tmp_path):
    """And says nothing of its own, whatever that is called, nor of one in other types."""
    adapter = tmp_path / "adapter.gguf"
    attach(pyggml.load(model), LoraConfig(rank=2)).save(adapter)
    metadata, tensors = parts_of(model)
    gguf.write(tmp_path / "same.gguf", metadata | {"general.name": "another"}, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyggml.load(tmp_path / "same.gguf", adapter)
    for name, _, _, array in tensors:
        if name == "blk.0.attn_v.weight":
            array += 1
    gguf.write(tmp_path / "merged.gguf", metadata, tensors)
    wanted = "adapter.gguf was trained on another model: merged.gguf has other weights"
    with pytest.warns(RuntimeWarning, match=wanted):
        pyggml.load(tmp_path / "merged.gguf", adapter)
