"""PEFT's folders ↔ adapter files: PyTorch's logits here, PEFT's tensors back.

The folders are PEFT's own (tests/golden/adapters/make_folders.py). With torch, transformers and
peft installed, every peer is compared both ways. The orders of rows of other classes are those of
llama.cpp's converter (tests/support/peft_orders.py).
"""

import json

import numpy as np
import peft_orders
import pytest
import tiny_models
from peft_folders import CONFIG, FOLDERS, GOLDEN, TENSORS, base, refusal, tensors_of, written
from safetensors import deserialize
from safetensors.numpy import load_file

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError
from pyggml.lora import LoraConfig, attach, merge
from pyggml.lora.peft import from_peft, to_peft
from pyggml.lora.peft.layouts import LAYOUTS, NO_LAYOUT
from pyggml.lora.peft.orders import HeadCounts, queries_by_group
from pyggml.lora.peft.twins import EXPERTS, Twins
from pyggml.models import ARCHITECTURES

from measures import nmse
from peers import PEERS
from peers.dense import grouped, rows_beside
from peers.files import GOLDEN as BASES
from peers.peft_adapters import NOT_IN_PEFT, NOT_IN_TRANSFORMERS, adapted, logits, tokens
from peers.trial import llama_cpp_logits

NAMES = sorted(p.name for p in FOLDERS.iterdir())
HEAD_COUNTS = ("head_count", "head_count_kv")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_gives_pytorch_s_logits(tmp_path, name):
    from_peft(base(name), FOLDERS / name, tmp_path / "a.gguf")
    wanted = np.load(FOLDERS / name / "logits.npy")
    found = base(name, tmp_path / "a.gguf").logits(tokens())
    assert nmse(found, wanted) < 1e-11
    assert nmse(base(name).logits(tokens()), wanted) > 0.1, "the adapter does next to nothing"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_same(tmp_path, name):
    """But for a rounding of B where alphas differ: a file has one."""
    ranks = from_peft(base(name), FOLDERS / name, tmp_path / "a.gguf")
    assert to_peft(base(name), tmp_path / "a.gguf", tmp_path / "back") == ranks
    before, after = values(FOLDERS / name / TENSORS), load_file(tmp_path / "back" / TENSORS)
    before = {n: a for n, a in before.items() if not n.endswith("base_layer.weight")}
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_allclose(after[key], array, rtol=2e-7 if "_B" in key else 0)
    from_peft(base(name), tmp_path / "back", tmp_path / "b.gguf")
    once, twice = (base(name, tmp_path / f"{x}.gguf").logits(tokens()) for x in "ab")
    assert nmse(twice, once) < 1e-12


def values(path):
    """A safetensors file's arrays as float32, bfloat16 included."""
    found = {}
    for name, t in deserialize(path.read_bytes()):
        if t["dtype"] == "BF16":
            array = (np.frombuffer(t["data"], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(t["data"], {"F16": np.float16, "F32": np.float32}[t["dtype"]])
        found[name] = array.astype(np.float32).reshape(t["shape"])
    return found


def test_a_file_of_one_alpha_comes_back_bit_for_bit(tmp_path):
    path, adapter = GOLDEN / "models/qwen3-F16.gguf", GOLDEN / "models/qwen3-lora.gguf"
    to_peft(pyggml.load(path), adapter, tmp_path / "folder", "hub/name")
    from_peft(pyggml.load(path), tmp_path / "folder", tmp_path / "back.gguf")
    with gguf.open(adapter) as a, gguf.open(tmp_path / "back.gguf") as b:
        assert a.get("adapter.lora.alpha") == b.get("adapter.lora.alpha")
    before, after = tensors_of(adapter), tensors_of(tmp_path / "back.gguf")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    settings = json.loads((tmp_path / "folder" / CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["rank_pattern"]) == (4, 8, {})
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert {len(m.split(".")) for m in settings["target_modules"]} == {1}, "names without layers"
    assert settings["base_model_name_or_path"] == "hub/name"


@pytest.mark.parametrize("n_more", [0, 2])
def test_tensors_of_one_module_with_several_as_become_ranks(n_more, tmp_path):
    """qwen3next's qkv and z are one matrix in transformers. Other ranks mean other scales."""
    model = base("qwen3next")
    from_peft(model, FOLDERS / "qwen3next", tmp_path / "a.gguf")
    with gguf.open(tmp_path / "a.gguf") as file:
        arrays = {n: np.array(file.data(n)) for n in file.tensors}
        for name, axis in (
            ("blk.0.attn_gate.weight.lora_a", 0),
            ("blk.0.attn_gate.weight.lora_b", 1),
        ):
            rows = np.moveaxis(arrays[name], axis, 0)
            arrays[name] = np.moveaxis(np.concatenate([rows, rows[:n_more]]), 0, axis).copy()
        arrays["blk.0.attn_gate.weight.lora_a"] *= np.float32(0.5)  # no longer that of attn_qkv
        written = [(n, file.tensors[n].dtype, a.shape, a) for n, a in arrays.items()]
        gguf.write(tmp_path / "b.gguf", file.metadata, written)
    ranks = to_peft(model, tmp_path / "b.gguf", tmp_path / "folder")
    assert ranks["model.layers.0.linear_attn.in_proj_qkvz"] == 6 + n_more
    from_peft(model, tmp_path / "folder", tmp_path / "c.gguf")
    found, wanted = (base("qwen3next", tmp_path / f"{x}.gguf").logits(tokens()) for x in "cb")
    assert nmse(found, wanted) < 1e-11


def test_experts_may_be_modules_of_their_own(tmp_path):
    """As in transformers 4: those without an update get zeros. Other classes' names are known."""
    model, rng = base("qwen3moe"), np.random.default_rng(0)
    a, b = rng.standard_normal((2, 32)), rng.standard_normal((24, 2))
    halves = {"lora_A.weight": a, "lora_B.weight": b}
    name = "base_model.model.model.language_model.layers.1.mlp.experts.3.up_proj"
    folder = written(tmp_path / "f", {f"{name}.{h}": x for h, x in halves.items()}, r=2)
    from_peft(model, folder, tmp_path / "a.gguf")
    found = tensors_of(tmp_path / "a.gguf")
    assert found["blk.1.ffn_up_exps.weight.lora_b"].shape == (6, 24, 2)
    np.testing.assert_array_equal(found["blk.1.ffn_up_exps.weight.lora_a"][3], np.float32(a))
    assert not found["blk.1.ffn_up_exps.weight.lora_a"][[0, 1, 2, 4, 5]].any()


def test_fused_matrices_of_classes_outside_of_transformers(tmp_path):
    """W_pack and wqkv, against the conversions of the weights that the peers are made by."""
    rng = np.random.default_rng(0)
    for name, module, n_kv in (
        ("baichuan", "self_attn.W_pack", 4),
        ("internlm2", "attention.wqkv", 2),
    ):
        n = 32 * (4 + 2 * n_kv) // 4
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((2, 32), (n, 2)))
        key = f"base_model.model.model.layers.0.{module}"
        pair = {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        folder = written(tmp_path / name, pair, r=2)
        from_peft(base(name), folder, tmp_path / "a.gguf")
        rows = grouped("w", 2, 2)({"w.weight": b})["w.weight"] if name == "internlm2" else b
        parts = np.split(rows, np.cumsum([32, 8 * n_kv]))
        state = dict(zip(("q_proj.weight", "k_proj.weight", "v.weight"), parts, strict=True))
        wanted = rows_beside({"q_proj": 4, "k_proj": n_kv})(state).values()
        found = tensors_of(tmp_path / "a.gguf")
        for x, want in zip("qkv", wanted, strict=True):
            np.testing.assert_array_equal(found[f"blk.0.attn_{x}.weight.lora_b"], want)


def test_queries_keys_and_values_of_one_matrix_are_ranks_in_turn(tmp_path):
    """Transformers' Sarvam has modules of its own for what a file of bailingmoe2 has in one."""
    model = pyggml.load(tiny_models.write(tmp_path / "m.gguf", "bailingmoe2"))
    n_out, n_in = model.parts.weights["blk.0.attn_qkv.weight"].shape
    n, n_kv = (int(model.file.get(f"bailingmoe2.attention.{k}")) for k in HEAD_COUNTS)
    size, rng = n_out // (n + 2 * n_kv), np.random.default_rng(0)
    alphas, at = {"q_proj": 4, "v_proj": 6}, {"q_proj": 0, "v_proj": size * (n + n_kv)}
    arrays, wanted = {}, np.zeros((n_out, n_in))
    for x, rows in (("q_proj", n * size), ("v_proj", n_kv * size)):
        key = f"base_model.model.model.layers.0.self_attn.{x}"
        a, b = rng.standard_normal((2, n_in)), rng.standard_normal((rows, 2))
        arrays |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        wanted[at[x] : at[x] + rows] = b @ a * alphas[x] / 2
    folder = written(tmp_path / "f", arrays, r=2, lora_alpha=1, alpha_pattern=alphas)
    from_peft(model, folder, tmp_path / "a.gguf")
    tensors = tensors_of(tmp_path / "a.gguf")
    a, b = (tensors[f"blk.0.attn_qkv.weight.lora_{x}"] for x in "ab")
    with gguf.open(tmp_path / "a.gguf") as file:
        scale = file.get("adapter.lora.alpha") / len(a)
    np.testing.assert_allclose(b @ a * scale, wanted, rtol=0, atol=1e-5)


# -- every architecture ---------------------------------------------------------------------------


def test_every_architecture_has_a_layout_or_a_reason():
    assert LAYOUTS.keys() | NO_LAYOUT.keys() == ARCHITECTURES.keys()
    assert not LAYOUTS.keys() & NO_LAYOUT.keys()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore:llama.cpp passes over")
@pytest.mark.filterwarnings("ignore:.*the class multiplies")
@pytest.mark.filterwarnings("ignore:.*PEFT refuses")
def test_every_module_comes_back_bit_for_bit(tmp_path, name):
    model = pyggml.load(tiny_models.write(tmp_path / "m.gguf", name))
    stored = LAYOUTS[name].stored
    arrays = {key.replace(*stored): array for key, array in every_module(model).items()}
    from_peft(model, written(tmp_path / "f", arrays, r=2), tmp_path / "a.gguf")
    to_peft(model, tmp_path / "a.gguf", tmp_path / "back")
    back = load_file(tmp_path / "back" / TENSORS)
    assert back.keys() == arrays.keys()
    for key, array in back.items():
        np.testing.assert_array_equal(array, np.float32(arrays[key]), key)
    held, specs = tensors_of(tmp_path / "a.gguf").keys(), model.parts.decoder.tensors()
    usual = {n for n, s in specs.items() if n.startswith("blk.") and s.usual and s.update(1)}
    usual = {n for n in usual if n in model.parts.weights and not (name == "dbrx" and "_exps" in n)}
    assert {f"{n}.lora_a" for n in usual} <= held, "modules of `attach` that PEFT has no name for"


def every_module(model):
    """A PEFT file's arrays, of rank 2, for each module of a model's class."""
    rng, modules, arrays = np.random.default_rng(0), Twins(model).modules, {}
    for name, module in modules.items():
        if module.table and model.parts.output_name == "token_embd":
            continue
        key, (n_out, n_in), wide = name, module.shape, 2 * max(module.n_expert, 1)
        if module.n_expert:
            key, parameter = name.rsplit(".", 1)
            *inner, _ = [p for p in EXPERTS if f"{key}.{p}" in modules]
            key += ".base_layer" if parameter in inner else ""
        halves = {"lora_A.weight": (wide, n_in), "lora_B.weight": (n_out, wide)}
        if module.table:
            halves = {"lora_embedding_A": (2, n_out), "lora_embedding_B": (n_in, 2)}
        for half, shape in halves.items():
            arrays[f"base_model.model.{key}.{half}"] = rng.standard_normal(shape)
    return arrays


@pytest.mark.parametrize("name", peft_orders.NAMES)
def test_rows_lie_as_llama_cpp_s_converter_lays_them(tmp_path, name):
    golden = json.loads(peft_orders.GOLDEN.read_text())[name]
    checksums = peft_orders.checksums(peft_orders.places(peft_orders.model_of(name, tmp_path)))
    assert golden.keys() <= checksums.keys()
    assert {n: checksums[n] for n in golden} == golden


def test_queries_that_take_keys_by_turns():
    """PLaMo 13B, as in the converter's shuffle_attn_q_weight."""
    rows = np.arange(5120)
    (order,) = queries_by_group(rows, HeadCounts(40, 5))
    np.testing.assert_array_equal(order, rows.reshape(8, 5, 128).transpose(1, 0, 2).ravel())


def test_what_a_converter_changes_by_an_unknown_number_is_refused(tmp_path):
    model = pyggml.load(tiny_models.write(tmp_path / "m.gguf", "jais"))
    head = {"lora_A.weight": np.ones((3, 16)), "lora_B.weight": np.ones((11, 3))}
    arrays = {f"base_model.model.lm_head.{n}": a for n, a in head.items()}
    folder = written(tmp_path / "f", arrays)
    assert "'lm_head' cannot be updated: the converter multiplies it by" in refusal(folder, model)
    attach(model, LoraConfig(rank=2, modules=("output",))).save(tmp_path / "a.gguf")
    with pytest.raises(AdapterError, match="'output.weight' cannot be a module's: the converter m"):
        to_peft(model, tmp_path / "a.gguf", tmp_path / "back")


def test_a_class_may_have_two_forms_of_files(tmp_path):
    """ChatGLM's own class, whose q, k and v are one matrix; a shared expert without others."""
    tensors = {f"blk.{i}.attn_{x}.weight": None for i in (0, 1) for x in "qkv"}
    tensors |= {f"blk.{i}.attn_qkv.weight": (32, 16) for i in (0, 1)}
    path = tiny_models.write(tmp_path / "m.gguf", "chatglm", tensors=tensors)
    modules = Twins(pyggml.load(path)).modules
    name = "transformer.encoder.layers.1.self_attention.query_key_value"
    assert [p.tensor for p in modules[name].parts] == ["blk.1.attn_qkv.weight"]
    tiny_models.write(tmp_path / "d.gguf", "granitehybrid", {"expert_count": 0})
    modules = Twins(pyggml.load(tmp_path / "d.gguf")).modules
    parts = modules["model.layers.0.shared_mlp.input_linear"].parts
    assert [p.tensor for p in parts] == ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]


@pytest.mark.filterwarnings("ignore:llama.cpp passes over")
def test_all_linear_of_gemma_3n(tmp_path):
    """Towers, and keys of layers that have those of others, are left out and named; what llama.cpp
    passes over counts here as it does merged."""
    windows = np.arange(21) % 5 != 4  # the last layer has keys of its own no more
    sizes = {"block_count": 21, "attention.sliding_window_pattern": windows}
    path = tiny_models.write(tmp_path / "m.gguf", "gemma3n", sizes, numbers=tiny_models.scaled)
    model = pyggml.load(path, compute="f32")
    arrays = {k: 0.1 * a for k, a in every_module(model).items()}
    assert {k.rsplit(".", 3)[-3] for k in arrays if "layers" not in k} >= {
        "per_layer_model_projection",
        "2",  # of model.altup_projections and altup_unembed_projections
    }
    prefix = "base_model.model.model"
    for name in ("language_model.layers.20.self_attn.k_proj", "vision_tower.blocks.0.conv_pw"):
        arrays |= {f"{prefix}.{name}.lora_{h}.weight": np.ones((2, 2)) for h in "AB"}
    folder = written(tmp_path / "f", arrays, r=2)
    with (
        pytest.warns(
            RuntimeWarning, match="a module of a layer that has the keys .*layers.20.self"
        ),
        pytest.warns(RuntimeWarning, match="a module for pictures or sound left out.*conv_pw"),
    ):
        from_peft(model, folder, tmp_path / "a.gguf")
    ids = np.arange(7)
    adapted = pyggml.load(path, tmp_path / "a.gguf", "f32")
    logits = adapted.logits(ids)
    assert nmse(logits, model.logits(ids)) > 1e-3
    merge(adapted, tmp_path / "merged.gguf", "F32")
    assert nmse(pyggml.load(tmp_path / "merged.gguf", compute="f32").logits(ids), logits) < 3e-10


def test_an_adapter_of_towers_alone_is_refused(tmp_path):
    arrays = {f"base_model.model.visual.x.lora_{h}.weight": np.ones((2, 2)) for h in "AB"}
    said = refusal(written(tmp_path / "f", arrays, r=2), base("qwen3moe"))
    assert "all its modules are for pictures or sound, wanted some of the text" in said


def test_a_router_may_be_a_module(tmp_path):
    """As in transformers 4."""
    model = base("qwen3moe")
    halves = {"lora_A.weight": np.ones((2, 32)), "lora_B.weight": np.ones((6, 2))}
    key = "base_model.model.model.layers.1.mlp.gate"
    folder = written(tmp_path / "f", {f"{key}.{h}": a for h, a in halves.items()}, r=2)
    from_peft(model, folder, tmp_path / "a.gguf")
    assert tensors_of(tmp_path / "a.gguf").keys() == {
        f"blk.1.ffn_gate_inp.weight.lora_{x}" for x in "ab"
    }


@pytest.mark.interop
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_gives_pytorch_s_logits(tmp_path, name):
    from_peft(base(name), FOLDERS / name, tmp_path / "a.gguf")
    found = llama_cpp_logits(BASES / f"{name}.gguf", tokens(), tmp_path / "a.gguf")
    assert nmse(found, np.load(FOLDERS / name / "logits.npy")) < 1e-5


# -- PEFT itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in PEERS if n not in NOT_IN_PEFT])
@pytest.mark.filterwarnings("ignore")
def test_peft_and_this_give_the_same_logits(tmp_path, name):
    """Both ways: PEFT's adapter here, and PEFT with what comes back."""
    for package in ("torch", "transformers", "peft"):
        pytest.importorskip(package)
    if name in NOT_IN_TRANSFORMERS:
        pytest.skip("its class is not part of transformers")
    from peft import PeftModel

    from peers.peer import torch_model

    model = adapted(name)
    model.save_pretrained(tmp_path / "theirs")
    from_peft(base(name), tmp_path / "theirs", tmp_path / "a.gguf")
    wanted = logits(model, tokens())
    assert nmse(base(name, tmp_path / "a.gguf").logits(tokens()), wanted) < 1e-11
    to_peft(base(name), tmp_path / "a.gguf", tmp_path / "ours")
    again = PeftModel.from_pretrained(torch_model(PEERS[name]), tmp_path / "ours").eval()
    assert nmse(logits(again, tokens()), wanted) < 1e-11


# -- what is refused ------------------------------------------------------------------------------


def latent(tmp_path, absorbed):
    """A small deepseek2, whose keys and values are made by a matrix for each head or by one."""
    if absorbed:
        return pyggml.load(
            tiny_models.write(tmp_path / "absorbed.gguf", "deepseek2"), compute="f32"
        )
    sizes = {"attention.key_length": 10, "attention.value_length": 6}
    sizes |= {"attention.key_length_mla": 0, "attention.value_length_mla": 0}
    sizes |= {"attention.head_count_kv": 4}
    tensors = {}
    for i in (0, 1):
        k, v = (
            tiny_models.normal(f"blk.{i}.attn_{x}_b.weight", shape)
            for x, shape in (("k", (4, 8, 6)), ("v", (4, 6, 8)))
        )
        both = np.concatenate([k.swapaxes(1, 2), v], axis=1)
        tensors[f"blk.{i}.attn_kv_b.weight"] = both.reshape(-1, 8)
    path = tiny_models.write(tmp_path / "whole.gguf", "deepseek2", sizes, tensors=tensors)
    return pyggml.load(path, compute="f32")


@pytest.mark.filterwarnings("ignore:llama.cpp passes over")
def test_a_module_of_all_heads_is_two_matrices_of_each(tmp_path):
    """kv_b_proj where the file has attn_k_b, upright, and attn_v_b: as where it has one matrix."""
    rng, at = np.random.default_rng(0), "base_model.model.model.layers.0.self_attn"
    pairs = {}
    for module, n_in, n_out in (("kv_b_proj", 8, 48), ("kv_a_proj_with_mqa", 16, 12)):
        pairs[f"{at}.{module}.lora_A.weight"] = rng.standard_normal((2, n_in))
        pairs[f"{at}.{module}.lora_B.weight"] = rng.standard_normal((n_out, 2))
    folder = written(tmp_path / "folder", pairs, r=2)
    ids, logits = np.arange(9), []
    for absorbed in (True, False):
        model = latent(tmp_path, absorbed)
        from_peft(model, folder, tmp_path / "a.gguf")
        adapted = pyggml.load(model.file.path, tmp_path / "a.gguf", "f32").logits(ids)
        assert nmse(adapted, model.logits(ids)) > 1e-3
        logits.append(adapted)
        to_peft(model, tmp_path / "a.gguf", tmp_path / f"back{absorbed}")
        back = load_file(tmp_path / f"back{absorbed}" / TENSORS)
        assert back.keys() == pairs.keys()
        for key, array in back.items():
            np.testing.assert_array_equal(array, np.float32(pairs[key]))
    assert nmse(logits[0], logits[1]) < 1e-9


@pytest.mark.filterwarnings("ignore:llama.cpp passes over")
def test_heads_with_updates_of_their_own_are_refused(tmp_path):
    model = latent(tmp_path, absorbed=True)
    attach(model, LoraConfig(rank=2, modules=("attn_v_b",))).save(tmp_path / "a.gguf")
    with pytest.raises(AdapterError, match="attn_v_b.weight: heads have updates of their own"):
        to_peft(model, tmp_path / "a.gguf", tmp_path / "folder")


def test_what_llama_cpp_passes_over_is_said_when_it_is_read(tmp_path):
    key = "base_model.model.model.layers.1.self_attn.q_a_proj"
    pair = {f"{key}.lora_A.weight": np.ones((2, 16)), f"{key}.lora_B.weight": np.ones((12, 2))}
    folder = written(tmp_path / "folder", pair, r=2)
    with pytest.warns(RuntimeWarning, match="passes over .* of attn_q_a"):
        from_peft(latent(tmp_path, absorbed=True), folder, tmp_path / "a.gguf")
