"""Which matrices get an update, how it starts, and that the file says the same."""

import numpy as np
import pytest
from tiny_models import write as write_tiny

import pyggml
from pyggml.errors import AdapterError, DataError, PyggmlError
from pyggml.graph.dtypes import F32
from pyggml.lora import LoraConfig, attach, loss_and_grads, unfreeze

pytestmark = pytest.mark.quick

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
    assert model.adapters == () and adapter.model.adapters == (adapter.pairs,)


def test_the_start_changes_nothing_and_is_peft_s(tiny):
    plain = pyggml.load(tiny)
    adapter = attach(plain, LoraConfig(rank=16, alpha=3.0))
    np.testing.assert_array_equal(adapter.model.logits(TOKENS), plain.logits(TOKENS))
    for pair in adapter.pairs.values():
        bound = pair.a.shape[1] ** -0.5
        assert bound * 0.9 < np.abs(pair.a.data).max() <= bound
        assert abs(pair.a.data.std() * np.sqrt(3) / bound - 1) < 0.1
        assert not pair.b.data.any()


def test_attaching_changes_the_adapter_s_model_alone(tiny):
    plain = pyggml.load(tiny)
    before = plain.logits(TOKENS)
    first = with_random_b(attach(plain, LoraConfig(rank=2)))
    changed = first.model.logits(TOKENS)
    assert np.abs(changed - before).max() > 1e-3
    second = with_random_b(attach(plain, LoraConfig(rank=3, seed=1)))
    both = plain.with_adapters(first.pairs, second.pairs)
    assert both.adapters == (first.pairs, second.pairs)
    assert np.abs(both.logits(TOKENS) - changed).max() > 1e-3
    np.testing.assert_array_equal(plain.logits(TOKENS), before)
    np.testing.assert_array_equal(first.model.logits(TOKENS), changed)


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


def test_what_llama_cpp_passes_over_is_trained_on_request_with_a_warning(tmp_path):
    """Latent matrices, and Kimi's attn_output in layers of delta attention alone."""
    for architecture in ("deepseek2", "kimi-linear"):
        model = pyggml.load(write_tiny(tmp_path / f"{architecture}.gguf", architecture))
        usual = attach(model, LoraConfig(rank=2)).pairs
        assert {name for name in usual if "attn" in name} == {
            f"blk.{i}.attn_output.weight" for i in (0, 1) if architecture == "deepseek2" or i == 1
        }
        modules = ("attn_kv_a_mqa", "attn_output", "output")
        passed = "attn_output" if architecture == "kimi-linear" else "attn_kv_a_mqa, output:"
        with pytest.warns(RuntimeWarning, match=f"llama.cpp passes over .* of .*{passed}"):
            pairs = attach(model, LoraConfig(rank=2, modules=modules)).pairs
        assert {"blk.0.attn_output.weight", "blk.1.attn_kv_a_mqa.weight"} <= pairs.keys()


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
    assert model.adapters == ()


@pytest.mark.parametrize(
    "module, reason",
    [("output", "llama.cpp would refuse"), ("token_embd", "llama.cpp would apply an update")],
)
def test_a_tied_output_is_refused_with_the_reason(tiny_tied, module, reason):
    with pytest.raises(AdapterError, match=f"{module} cannot be adapted: .*embedding.*{reason}"):
        attach(pyggml.load(tiny_tied), LoraConfig(modules=(module,)))


def test_a_rank_above_the_matrix_is_refused(tiny):
    fault = "^rank is 17, wanted at most 16: blk.0.attn_k.weight has 16 rows .* and 2 more matrices"
    with pytest.raises(AdapterError, match=fault):
        attach(pyggml.load(tiny), LoraConfig(rank=17, modules=("attn_k", "attn_q")))


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
    loss, grads = loss_and_grads(adapter.model, TOKENS)
    again_loss, again_grads = loss_and_grads(again, TOKENS)
    assert again_loss == loss
    assert list(again_grads) == list(adapter.parameters.tensors)
    for name, g in grads.items():
        np.testing.assert_array_equal(again_grads[name], g)


# -- a second time ------------------------------------------------------------------------------


def test_a_second_adapter_is_refused_and_the_first_can_be_left_out(tiny):
    plain = pyggml.load(tiny)
    model = with_random_b(attach(plain)).model
    with pytest.raises(AdapterError, match="has an adapter already: unfreeze.*with_adapters"):
        attach(model)
    base = model.with_adapters()
    assert base.adapters == () and attach(base).pairs
    np.testing.assert_array_equal(base.logits(TOKENS), plain.logits(TOKENS))


def test_an_adapter_that_was_loaded_can_be_trained_further(tiny, tmp_path):
    config = LoraConfig(rank=3, alpha=7.0, modules=("attn_q", "ffn_down"), skip_layers=1)
    first = with_random_b(attach(pyggml.load(tiny), config))
    first.save(tmp_path / "a.gguf")
    model = pyggml.load(tiny, adapter=tmp_path / "a.gguf")
    before = model.logits(TOKENS)
    adapter = unfreeze(model)
    found = adapter.config
    assert (found.rank, found.alpha, found.modules) == (3, 7.0, ("attn_q", "ffn_down"))
    assert list(adapter.pairs) == list(first.pairs)
    assert adapter.model.adapters == (adapter.pairs,)
    np.testing.assert_array_equal(adapter.model.logits(TOKENS), before)
    adapter.save(tmp_path / "b.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    adapter.parameters.data[:] *= 2  # the graph sees what training changes
    assert (adapter.model.logits(TOKENS) != before).any()
    np.testing.assert_array_equal(model.logits(TOKENS), before)


def test_what_cannot_be_unfrozen_is_explained(tiny):
    with pytest.raises(AdapterError, match="has 0 adapters, wanted one: load it with adapter="):
        unfreeze(pyggml.load(tiny))


@pytest.mark.parametrize("alpha, scales", [(None, [1, 1, 1]), (6, [3, 3, 2])])
def test_ranks_of_a_foreign_file_may_differ(tiny, tmp_path, alpha, scales):
    tensors = []
    for i, rank in enumerate((2, 2, 3)):
        name = f"blk.{i}.attn_q.weight"
        tensors += [(f"{name}.lora_a", F32, (rank, 32), np.ones((rank, 32), np.float32))]
        tensors += [(f"{name}.lora_b", F32, (32, rank), np.ones((32, rank), np.float32))]
    about = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    about |= {} if alpha is None else {"adapter.lora.alpha": np.float32(alpha)}
    pyggml.gguf.write(tmp_path / "a.gguf", about, tensors)
    adapter = unfreeze(pyggml.load(tiny, adapter=tmp_path / "a.gguf"))
    assert [p.scale for p in adapter.pairs.values()] == scales
    config = adapter.config
    assert (config.rank, config.alpha) == (2, alpha or 2)
    assert config.rank_pattern == {"blk.2.attn_q.weight": 3}
    assert config.alpha_pattern == (None if alpha else {"blk.2.attn_q.weight": 3})


def test_logits_past_the_model_s_context_are_refused(tiny):
    model = pyggml.load(tiny)
    assert model.logits([1] * 64).shape == (64, 48)
    with pytest.raises(DataError, match="65 tokens, wanted at most the 64 of the model's context"):
        model.logits([1] * 65)


def test_a_model_and_an_adapter_say_what_they_are(tiny):
    model = pyggml.load(tiny)
    said = "<Model 'tiny': llama, 3 blocks, 30,944 parameters, F32, context 64>"
    assert repr(model) == said
    adapter = attach(model, LoraConfig(rank=2, modules=("attn_q",)))
    assert repr(adapter.model) == said.replace(">", ", 1 adapter>")
    assert repr(adapter) == "<Adapter of rank 2, alpha 16, on 3 matrices of tiny: 384 parameters>"


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


@pytest.mark.parametrize(("setting", "value"), [("dora", True), ("init", "pissa")])
def test_starts_that_want_matrices_refuse_a_table(tiny, setting, value):
    config = LoraConfig(modules=("attn_q", "token_embd"), **{setting: value})
    with pytest.raises(AdapterError, match=f"{setting} wants plain matrices, and token_embd.wei"):
        attach(pyggml.load(tiny), config)
