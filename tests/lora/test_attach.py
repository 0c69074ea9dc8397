"""Which matrices get an update, how it starts, and that the file says the same."""

import numpy as np
import pytest

import pyggml
from pyggml.errors import AdapterError, PyggmlError
from pyggml.lora import LoraConfig, attach, loss_and_grads

TOKENS = np.arange(20) * 7 % 48


def with_random_b(adapter, seed=0):
    rng = np.random.default_rng(seed)
    for pair in adapter.pairs.values():
        pair.b.data[:] = rng.normal(0, 0.1, pair.b.shape)
    return adapter


def test_default_targets_are_all_linear_modules_of_the_blocks(tiny):
    model = pyggml.load(tiny)
    adapter = attach(model, LoraConfig(rank=3, alpha=5.0))
    assert list(adapter.pairs) == [
        f"blk.{i}.{m}.weight" for i in range(3) for m in model.parts.decoder.modules
    ]
    pair = adapter.pairs["blk.1.ffn_down.weight"]
    assert (pair.a.shape, pair.b.shape, pair.scale) == ((3, 64), (32, 3), 5.0 / 3)
    assert np.shares_memory(pair.a.data, adapter.parameters.data)
    assert model.adapters == [adapter.pairs]


def test_the_start_changes_nothing_and_is_peft_s(tiny):
    plain, model = pyggml.load(tiny), pyggml.load(tiny)
    adapter = attach(model, LoraConfig(rank=16, alpha=3.0))
    np.testing.assert_array_equal(model.logits(TOKENS), plain.logits(TOKENS))
    for pair in adapter.pairs.values():
        bound = pair.a.shape[1] ** -0.5
        assert bound * 0.9 < np.abs(pair.a.data).max() <= bound
        assert abs(pair.a.data.std() * np.sqrt(3) / bound - 1) < 0.1
        assert not pair.b.data.any()


def test_every_start_has_a_stream_of_its_own(tiny):
    every = attach(pyggml.load(tiny), LoraConfig(seed=4)).pairs
    one = attach(pyggml.load(tiny), LoraConfig(seed=4, modules=("attn_k",))).pairs
    other = attach(pyggml.load(tiny), LoraConfig(seed=5)).pairs
    name = "blk.2.attn_k.weight"
    np.testing.assert_array_equal(every[name].a.data, one[name].a.data)
    assert (every[name].a.data != other[name].a.data).any()
    assert (every[name].a.data != every["blk.2.attn_v.weight"].a.data).any()


def test_a_module_is_matched_by_its_exact_name(tiny):
    pairs = attach(pyggml.load(tiny), LoraConfig(modules=("output", "attn_q"))).pairs
    assert list(pairs) == [*(f"blk.{i}.attn_q.weight" for i in range(3)), "output.weight"]


REFUSED = [
    (("attn_qq", "ffn"), "attn_qq is no linear module .*attn_q, .*; ffn is no linear module"),
    (("attn_norm",), "attn_norm cannot be adapted: llama.cpp ignores updates of norms"),
    (("output_norm",), "output_norm cannot be adapted: llama.cpp ignores"),
]


@pytest.mark.parametrize("modules, message", REFUSED)
def test_modules_that_would_have_no_effect_are_refused(tiny, modules, message):
    model = pyggml.load(tiny)
    with pytest.raises(AdapterError, match=message):
        attach(model, LoraConfig(modules=modules))
    assert model.adapters == []


@pytest.mark.parametrize(
    "module, reason",
    [("output", "llama.cpp would refuse"), ("token_embd", "llama.cpp would apply an update")],
)
def test_a_tied_output_is_refused_with_the_reason(tiny_tied, module, reason):
    with pytest.raises(AdapterError, match=f"{module} cannot be adapted: .*embedding.*{reason}"):
        attach(pyggml.load(tiny_tied), LoraConfig(modules=(module,)))


def test_a_rank_above_the_matrix_is_refused(tiny):
    with pytest.raises(AdapterError, match=r"blk.0.attn_k.weight is 16 × 32, so rank is 17") as e:
        attach(pyggml.load(tiny), LoraConfig(rank=17, modules=("attn_k", "attn_q")))
    assert "attn_q" not in str(e.value) and "blk.2.attn_k" in str(e.value)


def test_skipping_every_block_is_refused(tiny):
    with pytest.raises(AdapterError, match="skip_layers is 3, wanted below the model's 3"):
        attach(pyggml.load(tiny), LoraConfig(skip_layers=3))


@pytest.mark.parametrize("modules", [None, ("output", "ffn_up")])
def test_the_file_reads_back_as_the_same_adapter(tiny, tmp_path, modules):
    model = pyggml.load(tiny)
    adapter = with_random_b(attach(model, LoraConfig(rank=4, alpha=6.0, modules=modules)))
    adapter.save(tmp_path / "a.gguf")
    again = pyggml.load(tiny, adapter=tmp_path / "a.gguf")
    assert list(again.adapters[0]) == list(adapter.pairs)
    for name, pair in again.adapters[0].items():
        assert pair.scale == 1.5
        np.testing.assert_array_equal(pair.a.data, adapter.pairs[name].a.data)
        np.testing.assert_array_equal(pair.b.data, adapter.pairs[name].b.data)
    loss, grads = loss_and_grads(model, TOKENS)
    again_loss, again_grads = loss_and_grads(again, TOKENS)
    assert again_loss == loss
    assert list(again_grads) == list(adapter.parameters.tensors)
    for name, g in grads.items():
        np.testing.assert_array_equal(again_grads[name], g)


def test_the_keys_are_llama_cpp_s(tiny, tmp_path):
    attach(pyggml.load(tiny), LoraConfig(rank=2, alpha=7.0)).save(tmp_path / "a.gguf")
    with pyggml.gguf.open(tmp_path / "a.gguf") as file:
        assert file.get("general.type") == "adapter"
        assert file.get("general.architecture") == "llama"
        assert file.get("adapter.type") == "lora"
        assert file.metadata["adapter.lora.alpha"].kind == "FLOAT32"
        assert file.get("adapter.lora.alpha") == 7.0
        assert {t.dtype.name for t in file.tensors.values()} == {"F32"}


def test_a_folder_that_is_not_there_is_named(tiny, tmp_path):
    adapter = attach(pyggml.load(tiny))
    with pytest.raises(PyggmlError, match="nowhere"):
        adapter.save(tmp_path / "nowhere" / "a.gguf")
