"""Layers that share keys, per-layer inputs and layers of unlike heads: what they keep, what is
refused, and that other features see through them."""

import numpy as np
import pytest
from llama_models import VARIANTS, tokens_of, with_adapter, write

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError, ModelError
from pyggml.generation import Batch, Session
from pyggml.graph.dtypes import F32
from pyggml.look import lens
from pyggml.lora import LoraConfig, attach
from pyggml.lora.peft import from_peft, to_peft

from measures import nmse
from peers.trial import llama_cpp_logits

TOKENS = tokens_of("gemma4")


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "model.gguf", *VARIANTS["gemma4"])


@pytest.fixture
def model(path):
    return pyggml.load(path, compute="f32")


def rewritten(path, add=(), keys=(), drop=()):
    """The file with further arrays and other keys, without some tensors."""
    with gguf.open(path) as file:
        arrays = {n: np.array(file.data(n)) for n in file.tensors if n not in drop} | dict(add)
        metadata = {**file.metadata, **dict(keys)}
    other = path.with_name("other.gguf")
    gguf.write(other, metadata, [(n, F32, a.shape, a) for n, a in arrays.items()])
    return other


def test_the_cache_has_rows_of_layers_with_keys_of_their_own(model):
    rows = model.parts.decoder.rows()
    assert {name.split(".")[1] for name in rows} == {"0", "1", "2"}
    assert [rows[f"blk.{i}.cache_k"] for i in range(3)] == [(2, 32), (2, 32), (2, 16)]


@pytest.mark.parametrize("cache_type", ["f32", ("q8_0", "f16")], ids=str)
def test_sequences_in_one_cache_do_not_touch_one_another(tmp_path, cache_type):
    keys = {"attention.key_length": 32, "attention.value_length": 32}
    model = pyggml.load(write(tmp_path / "m.gguf", "gemma4", keys, VARIANTS["gemma4"][2]))
    batch, texts = Batch(model, 2, 24, cache_type), (TOKENS, TOKENS[::-1])
    slots = [batch.open() for _ in texts]
    for start in range(0, 24, 6):
        found = batch.feed({s: t[start : start + 6] for s, t in zip(slots, texts, strict=True)})
    for slot, text in zip(slots, texts, strict=True):
        assert nmse(found[slot], Session(model, 24, cache_type).feed(text)) < 1e-6


def test_a_shift_moves_the_rows_that_others_read(model):
    batch = Batch(model, 1, 24)
    slot = batch.open()
    batch.feed({slot: TOKENS})
    before = {n: np.array(t.data) for n, t in batch.memory.cache.rows.items()}
    n = slot.shift(4)
    after = {n: np.array(t.data) for n, t in batch.memory.cache.rows.items()}
    for name in before:
        moved = before[name][4 + n : 24]
        if name.endswith("_v"):
            np.testing.assert_array_equal(after[name][4 : 24 - n], moved)
        else:
            assert np.abs(after[name][4 : 24 - n] - moved).max() > 1e-3, "keys are turned"
    assert np.isfinite(batch.feed({slot: [1]})[slot]).all()


def test_a_change_of_keys_reaches_the_layers_that_share_them(model):
    names = [f"blk.{i}.attention" for i in range(5)]
    with model.trace(*names) as before:
        model.logits(TOKENS)
    with model.trace("blk.3.attention", "blk.4.q", scale={"blk.1.v": 2.0}) as after:
        model.logits(TOKENS)
    assert not {"blk.3.k", "blk.4.v"} & set(model.activations)
    heads = lens.attention_maps(model, TOKENS, [3])
    assert heads.shape == (1, 4, 24, 24)
    assert np.abs(after["blk.3.attention"] - before["blk.3.attention"]).max() > 0.1


@pytest.mark.parametrize("layer, source", [(0, 0), (2, 2), (3, 1), (4, 2)])
def test_maps_of_attention_times_values_are_what_it_gives(model, layer, source):
    (weights,) = lens.attention_maps(model, TOKENS, blocks=[layer])
    with model.trace(f"blk.{source}.v", f"blk.{layer}.attention") as t:
        model.logits(TOKENS)
    v = np.repeat(t[f"blk.{source}.v"], 2, axis=1)
    heads = np.einsum("hts,shd->thd", weights, v).reshape(len(TOKENS), -1)
    np.testing.assert_allclose(heads, t[f"blk.{layer}.attention"], rtol=0, atol=2e-5)


def test_the_share_of_a_branch_has_the_factors_of_later_layers(model):
    """Without the branch the stream before the last norm is less by them times what it adds."""
    shares = lens.logit_attribution(model, TOKENS, token=7)
    assert sum(name.endswith("per_layer_out") for name in shares) == 5
    with model.trace("token_embd", "blk.4.out", "output") as t:
        model.logits(TOKENS)
    assert sum(shares.values()) == pytest.approx(t["output"][-1, 7], abs=1e-4)
    norm = model.parts.weights["output_norm.weight"].data
    row = model.parts.weights["output.weight"].data[7]
    stream = t["blk.4.out"][-1].astype(np.float64)
    direction = norm * row / np.sqrt(np.mean(stream**2) + 1e-5)
    scales = [model.parts.weights[f"blk.{i}.layer_output_scale.weight"].data[0] for i in range(5)]
    embedding = np.prod(scales) * 8 * t["token_embd"][-1]  # √64
    assert shares["token_embd"] == pytest.approx(embedding @ direction, abs=1e-4)


def test_keys_that_a_file_has_and_no_layer_reads_are_passed_over(path, model):
    shape = model.parts.weights["blk.1.attn_k.weight"].shape
    extra = {f"blk.3.attn_{x}.weight": np.full(shape, 9, np.float32) for x in "kv"}
    other = pyggml.load(rewritten(path, extra), compute="f32")
    np.testing.assert_array_equal(other.logits(TOKENS), model.logits(TOKENS))
    with pytest.raises(ModelError, match="blk.3.attn_v_norm.weight is not used"):
        pyggml.load(rewritten(path, {"blk.3.attn_v_norm.weight": np.ones(16, np.float32)}))


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("attention.shared_kv_layers", 4, "layer 1 cannot read the keys of layer -1"),
        ("attention.shared_kv_layers", 3, "layer 2 cannot read the keys of layer 1: they are not"),
        ("attention.shared_kv_layers", 6, "shared_kv_layers is 6, wanted 0 to 5"),
        (
            "attention.head_count_kv",
            np.array([2, 2, 2, 1, 2], np.int32),
            "of layer 1: they are not",
        ),
        ("rope.dimension_count_swa", 64, "rope.dimension_count_swa is 64, wanted even and at most"),
        ("attention.value_length_swa", 16, "attention.value_length_swa is 16, wanted 32"),
    ],
)
def test_layers_that_cannot_share_are_refused(path, key, value, said):
    with pytest.raises(ModelError, match=said):
        pyggml.load(rewritten(path, keys={f"gemma4.{key}": value}))


def test_modules_are_those_that_llama_cpp_updates(model):
    """It applies no update to the table of per-layer embeddings nor to what is made of the token's
    embedding; shared layers have no k and v."""
    made = attach(model, LoraConfig(rank=4))
    layers = {n.split(".")[1] for n in made.pairs if n.endswith("attn_k.weight")}
    assert layers == {"0", "1", "2"}
    assert {"blk.0.inp_gate.weight", "blk.4.proj.weight"} <= made.pairs.keys()
    assert not any("attn_v" in n for n in made.pairs), "this file has none"
    for name in ("per_layer_token_embd", "per_layer_model_proj"):
        with pytest.raises(AdapterError, match=f"{name} is no linear module of this model"):
            attach(model, LoraConfig(rank=4, modules=(name,)))


def test_an_adapter_of_every_module_goes_to_peft_and_back(tmp_path):
    from safetensors.numpy import load_file

    path = write(tmp_path / "model.gguf", *VARIANTS["gemma3n"])
    model = pyggml.load(path, compute="f32")
    made = with_adapter(model, applied=False)
    made.save(tmp_path / "a.gguf")
    to_peft(model, tmp_path / "a.gguf", tmp_path / "peft")
    names = load_file(tmp_path / "peft/adapter_model.safetensors")
    assert len(names) == 2 * len(made.pairs)
    for name in ("altup.modality_router", "altup.correction_coefs", "laurel.linear_right"):
        assert f"base_model.model.model.layers.2.{name}.lora_A.weight" in names
    with pytest.warns(RuntimeWarning, match="llama.cpp passes over .* altup_router"):
        from_peft(model, tmp_path / "peft", tmp_path / "b.gguf")
    found = pyggml.load(path, tmp_path / "b.gguf", "f32").logits(TOKENS)
    assert nmse(found, made.model.logits(TOKENS)) < 1e-12


def test_an_adapter_goes_to_peft_and_back(path, model, tmp_path):
    pytest.importorskip("safetensors")
    modules = ("attn_q", "attn_k", "inp_gate", "proj", "ffn_gate_inp", "ffn_down", "ffn_gate_exps")
    modules += ("ffn_up_exps", "ffn_down_exps")
    made = attach(model, LoraConfig(rank=4, alpha=8.0, modules=modules))
    for i, pair in enumerate(made.pairs.values()):
        pair.b.data[:] = np.random.default_rng(i).standard_normal(pair.b.shape) / 8
    made.save(tmp_path / "a.gguf")
    to_peft(model, tmp_path / "a.gguf", tmp_path / "peft")
    from safetensors.numpy import load_file

    names = {
        n.removeprefix("base_model.model.model.layers.")
        for n in load_file(tmp_path / "peft/adapter_model.safetensors")
    }
    for name in ("4.per_layer_input_gate", "4.per_layer_projection", "0.router.proj", "0.experts"):
        assert f"{name}.lora_A.weight" in names
    assert "3.self_attn.k_proj.lora_A.weight" not in names
    from_peft(model, tmp_path / "peft", tmp_path / "b.gguf")
    found = pyggml.load(path, tmp_path / "b.gguf", "f32").logits(TOKENS)
    assert nmse(found, made.model.logits(TOKENS)) < 1e-12


def in_one(path):
    """Gates and ups of experts in one tensor, as the converter leaves those of the checkpoint."""
    with gguf.open(path) as file:
        arrays = {n: np.array(file.data(n)) for n in file.tensors}
    gates = [n for n in arrays if n.endswith("ffn_gate_exps.weight")]
    ups = [n.replace("gate", "up") for n in gates]
    both = {
        n.replace("gate", "gate_up"): np.concatenate((arrays[n], arrays[u]), axis=1)
        for n, u in zip(gates, ups, strict=True)
    }
    return rewritten(path, both, drop=(*gates, *ups))


def test_gates_and_ups_may_lie_in_one_tensor(path, model, tmp_path):
    one = pyggml.load(in_one(path), compute="f32")
    assert nmse(one.logits(TOKENS), model.logits(TOKENS)) < 1e-9
    made = attach(one, LoraConfig(rank=4, modules=("ffn_gate_up_exps", "ffn_down_exps")))
    for i, pair in enumerate(made.pairs.values()):
        pair.b.data[:] = np.random.default_rng(i).standard_normal(pair.b.shape) / 8
    made.save(tmp_path / "a.gguf")
    to_peft(one, tmp_path / "a.gguf", tmp_path / "peft")
    from_peft(one, tmp_path / "peft", tmp_path / "b.gguf")
    found = pyggml.load(one.file.path, tmp_path / "b.gguf", "f32").logits(TOKENS)
    assert nmse(found, made.model.logits(TOKENS)) < 1e-12


@pytest.mark.interop
def test_llama_cpp_agrees_on_one_tensor_of_gates_and_ups(path, tmp_path):
    one = in_one(path)
    model = pyggml.load(one, compute="f32")
    assert nmse(model.logits(TOKENS), llama_cpp_logits(one, TOKENS)) < 1e-9
    made = with_adapter(model)
    made.save(tmp_path / "a.gguf")
    theirs = llama_cpp_logits(one, TOKENS, tmp_path / "a.gguf")
    assert nmse(made.model.logits(TOKENS), theirs) < 1e-9
