"""Target modules by their names in transformers: those that PEFT would adapt."""

import pytest
import tiny_models

import pyggml
from pyggml.errors import AdapterError
from pyggml.lora import LoraConfig, attach, train_tensors
from pyggml.lora.adapter.names import fits, part_patterns
from pyggml.lora.peft.twins import Twins

from peers import PEERS
from peers.files import GOLDEN


def targets_of(model, *modules):
    return set(attach(model, LoraConfig(modules=modules, rank=1)).pairs)


@pytest.mark.parametrize("name", PEERS)
def test_a_name_means_what_it_means_in_the_class(name):
    """Every last word of a module of the class: all tensors of modules that end with it."""
    path = GOLDEN / f"{name}.gguf"
    model = pyggml.load(path)
    modules = Twins(model).modules.values()
    words = {m.name.rsplit(".", 1)[-1] for m in modules if not m.n_expert}
    tried = 0
    for word in words:
        wanted = {p.tensor for m in modules if f".{m.name}".endswith(f".{word}") for p in m.parts}
        try:
            found = targets_of(model, word)
        except AdapterError as error:
            assert "llama.cpp" in str(error), "a tied embedding, or a norm"
            continue
        experts = {name for name in found if "_exps" in name}
        assert found - experts == {n for n in wanted if "_exps" not in n}, word
        tried += 1
    assert tried


def test_names_of_ours_and_theirs_and_all_linear_are_the_same_adapter(tiny):
    model = pyggml.load(tiny)
    every = attach(model, LoraConfig(seed=3))
    for modules in (
        ("all-linear",),
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ("attn_q", "q_proj", "all-linear"),
    ):
        other = attach(model, LoraConfig(seed=3, modules=modules))
        assert set(other.pairs) == set(every.pairs)
        assert other.parameters.tensors.keys() == every.parameters.tensors.keys()
    assert targets_of(model, "mlp.down_proj") == {f"blk.{i}.ffn_down.weight" for i in range(3)}
    assert targets_of(model, "lm_head") == {"output.weight"}


def test_a_module_that_is_two_matrices_of_each_head(tmp_path):
    model = pyggml.load(tiny_models.write(tmp_path / "m.gguf", "deepseek2"))
    with pytest.warns(RuntimeWarning, match="attn_k_b, attn_v_b"):
        found = targets_of(model, "kv_b_proj")
    assert found == {f"blk.{i}.attn_{x}_b.weight" for i in (0, 1) for x in "kv"}


def test_patterns_of_ranks_take_these_names_too(tiny):
    config = LoraConfig(rank=2, rank_pattern={"down_proj": 4}, alpha_pattern={"q_proj": 8.0})
    pairs = attach(pyggml.load(tiny), config).pairs
    assert {n.split(".")[2] for n, p in pairs.items() if p.rank == 4} == {"ffn_down"}
    assert {n.split(".")[2] for n, p in pairs.items() if p.rank * p.scale == 8} == {"attn_q"}


def test_what_neither_has_is_refused_with_a_suggestion(tiny):
    with pytest.raises(AdapterError, match="attn_qq is no linear module .*did you mean 'attn_q'"):
        targets_of(pyggml.load(tiny), "attn_qq")
    with pytest.raises(AdapterError, match="qkv_proj is no linear module .*did you mean 'v_proj'"):
        targets_of(pyggml.load(tiny), "qkv_proj")
    with pytest.raises(AdapterError, match="model: did you mean 'output_norm.weight'"):
        train_tensors(pyggml.load(tiny), ["outputnorm.weight"])


@pytest.mark.parametrize(
    ("architecture", "word", "names"),
    [
        ("qwen3moe", "experts", {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}),
        ("qwen3moe", "router", {"ffn_gate_inp"}),
        ("llama", "norms", {"attn_norm", "ffn_norm", "output_norm"}),
        (
            "gpt2",
            "biases",
            {"attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"}
            | {"output_norm", "output"},
        ),
        ("gpt2", "embeddings", {"token_embd", "position_embd"}),
        ("qwen3moe", "q_proj", {"attn_q"}),
    ],
)  # fmt: skip
def test_parts_of_a_model_are_named(architecture, word, names):
    parts = tiny_models.zero_parts(architecture, 32)
    patterns = part_patterns(parts, [word])[word]
    fitting = {n for n in parts.weights if any(fits(p, n) for p in patterns)}
    assert {n.split(".")[-2] for n in fitting} == names
    assert all(n.endswith(".bias") for n in fitting) == (word == "biases")


def test_the_last_blocks_are_a_part(tiny):
    trained = train_tensors(pyggml.load(tiny), ["last-2", "output_norm"])
    blocks = {name.split(".")[1] for name in trained.parameters.tensors if name.startswith("blk.")}
    assert blocks == {"1", "2"} and len(trained.parameters.tensors) == 2 * 9 + 1
