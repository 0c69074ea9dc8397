"""The types that llama.cpp gives to the tensors of a file."""

import json
import os
import re
from pathlib import Path

import pytest
from gguf import GGUFReader, LlamaFileType
from hypothesis import given
from hypothesis import strategies as st

from pyggml.errors import QuantError
from pyggml.models import ARCHITECTURES
from pyggml.requantize import FILE_TYPES, ModelFacts, check_file_type, mix

FOLDER = Path(__file__).parents[1] / "golden/quants"
GOLDEN, EVERY = (json.loads((FOLDER / f"{n}.json").read_text()) for n in ("mix", "mixes"))
MODELS = [(GOLDEN, name) for name in GOLDEN["models"]]
MODELS += [(EVERY, name) for name in EVERY["models"]]
SHARED = Path(__file__).parents[3] / "shared"
FILES = [
    *sorted((SHARED / "fixtures").glob("*-*_*.gguf")),
    *sorted((SHARED / "models").glob("*.gguf")),
]
LLAMA = ModelFacts(architecture="llama", n_layer=8, n_head=4, n_head_kv=2, n_expert=0)


@pytest.mark.parametrize("known", [False, True], ids=["", "importance"])
@pytest.mark.parametrize(("golden", "model"), MODELS, ids=[name for _, name in MODELS])
def test_equals_llama_cpp(golden, model, known):
    record = golden["models"][model]
    facts = ModelFacts(**record["model"], has_importance=known)
    shapes = [(name, tuple(shape)) for name, (shape, *_) in record["tensors"].items()]
    found = {f: mix(f, shapes, facts) for f in golden["file_types"]}
    for name, (_, *numbers) in record["tensors"].items():
        wanted = golden["choices"][numbers[known]].split()
        assert {f: found[f][name].name for f in found} == dict(zip(found, wanted, strict=True)), (
            name
        )


def test_golden_has_every_file_type_and_architecture():
    assert set(GOLDEN["file_types"]) == set(EVERY["file_types"]) == set(FILE_TYPES)
    assert EVERY["models"].keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", list(FILE_TYPES))
def test_numbers_are_llama_cpps(name):
    numbers = {n.partition("_")[2]: t.value for n, t in LlamaFileType.__members__.items()}
    numbers["Q2_0"] = 41  # which the package does not know yet
    assert FILE_TYPES[name].number == numbers[name]
    assert FILE_TYPES[name].name == name


@pytest.mark.skipif(not FILES, reason="needs ../shared: models quantised by llama.cpp")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_equals_the_file(path):
    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        value = field.contents() if field else 0
        return int(value[0] if isinstance(value, list) else value)

    model = ModelFacts(
        architecture=architecture,
        n_layer=number("block_count"),
        n_head=number("attention.head_count"),
        n_head_kv=number("attention.head_count_kv"),
        n_expert=number("expert_count"),
    )
    file_type = path.stem.split("-")[-1]
    assert reader.fields["general.file_type"].contents() == FILE_TYPES[file_type].number
    shapes = [(t.name, tuple(int(n) for n in t.shape[::-1])) for t in reader.tensors]
    found = mix(file_type, shapes, model)
    assert {n: d.name for n, d in found.items()} == {
        t.name: t.tensor_type.name for t in reader.tensors
    }


# Architectures of llama.cpp's tests/snapshots, the folder that QUANT_SNAPSHOTS names.
SNAPSHOTS = {
    "deepseek-v3.1": "deepseek2",
    "gemma-3-4b-it": "gemma3",
    "glm-4.6v": "glm4moe",
    "gpt-oss-120b": "gpt-oss",
    "meta-llama-3.1-70b-instruct": "llama",
    "nvidia-nemotron-3-nano-30b-a3b": "nemotron_h_moe",
    "qwen3-0.6b": "qwen3",
    "qwen3-14b": "qwen3",
    "qwen3-coder-next": "qwen3next",
    "qwen3.5-397b-a17b": "qwen35moe",
    "qwen3.6-27b": "qwen35",
    "step-3.5-flash": "step35",
}


@pytest.mark.interop
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_equals_a_snapshot(name):
    """Every tensor that some file type gives another type than its base. Rows that blocks of 256
    do not divide are those that Q6_K does not pack as Q6_K."""
    # The snapshots, 1 MB of llama.cpp's source, are not copied here; mixes.json holds all names.
    folder = os.environ.get("QUANT_SNAPSHOTS") or pytest.skip("QUANT_SNAPSHOTS names no folder")
    text = (Path(folder) / f"{name}.schema").read_text()
    counts = {key: int(n) for key, n in re.findall(r"(n_\w+)=(\d+)", text)}
    facts = {k: counts.get(k, 0) for k in ("n_layer", "n_head", "n_head_kv", "n_expert")}
    sections = {
        m[1]: (m[2], dict(line.rsplit(" ", 1) for line in m[3].splitlines() if line))
        for m in re.finditer(r"^\[(\S+)\] (\S+)\n((?:[^\[\n].*\n|\n)*)", text, re.MULTILINE)
    }
    names = sorted({n for _, others in sections.values() for n in others})
    short = {n for n, kind in sections["Q6_K"][1].items() if kind != "q6_K"}
    stacks = ("_exps.weight", "attn_k_b.weight", "attn_v_b.weight")
    shapes = [(n, (4,) * (1 + n.endswith(stacks)) + (288 if n in short else 512,)) for n in names]
    assert len(sections) > 30
    for file_type, (usual, others) in sections.items():
        found = mix(file_type, shapes, ModelFacts(architecture=SNAPSHOTS[name], **facts))
        wanted = {n: others.get(n, usual).upper() for n in names}
        assert {n: t.name for n, t in found.items()} == wanted, file_type


@given(order=st.permutations(list(GOLDEN["models"]["gemma3"]["tensors"].items())))
def test_order_of_the_tensors_does_not_matter(order):
    model = ModelFacts(**GOLDEN["models"]["gemma3"]["model"])
    shapes = [(name, tuple(shape)) for name, (shape, *_) in order]
    assert mix("Q4_K_M", shapes, model) == mix("Q4_K_M", sorted(shapes), model)


@given(n_in=st.integers(1, 600), file_type=st.sampled_from(list(FILE_TYPES)))
def test_every_row_length_gets_a_type_that_holds_it(n_in, file_type):
    names = ["token_embd", "output", "blk.0.attn_v", "blk.1.ffn_down", "blk.2.attn_q"]
    found = mix(file_type, [(f"{n}.weight", (4, n_in)) for n in names], LLAMA)
    assert all(n_in % d.block == 0 for d in found.values())


@pytest.mark.parametrize(
    "name, shape",
    [
        ("blk.0.attn_norm.weight", (512,)),
        ("blk.0.attn_q.bias", (512,)),
        ("blk.0.attn_q.weight", (1, 512)),  # one axis to ggml
        ("blk.0.attn_q_norm.weight", (4, 512)),
        ("blk.0.ffn_gate_inp.weight", (8, 512)),
        ("blk.0.ssm_a", (512, 16)),
        ("position_embd.weight", (512, 512)),
    ],
)
def test_what_stays_f32(name, shape):
    assert mix("Q4_K_M", [(name, shape)], LLAMA)[name].name == "F32"


def test_a_size_may_be_left_out_as_for_llama_quantize():
    assert [check_file_type(n) for n in ("Q3_K", "Q5_K", "Q2_K")] == ["Q3_K_M", "Q5_K_M", "Q2_K"]


def test_unknown_file_type_is_refused():
    with pytest.raises(QuantError, match="'Q4_K_X' is no file type; known are F32, F16"):
        mix("Q4_K_X", [], LLAMA)


def test_expert_outside_of_the_layers_is_refused():
    experts = ModelFacts(architecture="llama", n_layer=2, n_head=4, n_head_kv=2, n_expert=4)
    name = "blk.2.ffn_down_exps.weight"
    with pytest.raises(QuantError, match=f"'{name}' is in none of the model's 2 layers"):
        mix("Q4_K_M", [(name, (4, 256, 256))], experts)
