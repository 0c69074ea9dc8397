"""Folders of PEFT and adapters that are refused, and what is said of them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from peft_folders import CONFIG, FOLDERS, GOLDEN, TENSORS, base, refusal, written
from safetensors.numpy import load_file, save_file

import pyggml
from pyggml.errors import PyggmlError
from pyggml.lora.peft import from_peft, to_peft


@pytest.fixture
def copy(tmp_path):
    """The folder of granite, to be changed."""
    return Path(shutil.copytree(FOLDERS / "granite", tmp_path / "copy"))


SETTINGS = [
    ({"use_dora": True}, "use_dora is True, but an adapter file has no place for DoRA's magnitud"),
    (
        {"modules_to_save": ["lm_head"]},
        "modules_to_save is ['lm_head'], but an adapter file has no place for whole modules",
    ),
    ({"bias": "all"}, "bias is 'all', but an adapter file has no place for biases"),
    ({"trainable_token_indices": [1]}, "has no place for single tokens: merge it in PEFT"),
    ({"init_lora_weights": "pissa_niter_4"}, "is 'pissa_niter_4', which changes the base model"),
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA', wanted 'LORA'"),
    ({"r": 0}, "r is 0, wanted a whole number above 0"),
    (
        {"r": True, "lora_alpha": None},
        "r is True, wanted a whole … ; lora_alpha is None, wanted a number above",
    ),
    ({"rank_pattern": {"(a+)+": 2}}, "rank_pattern has '(a+)+', wanted one without repeated grou"),
    ({"alpha_pattern": {"[": 2}}, "alpha_pattern has '[', which is no pattern"),
    ({"alpha_pattern": [1]}, "alpha_pattern is [1], wanted numbers by pattern"),
    ({"rank_pattern": {"q_proj": 4}}, "has A (3, 32) and B (32, 3), wanted (4, 32) and (32, 4) f"),
]


@pytest.mark.parametrize(("change", "said"), SETTINGS, ids=[next(iter(c)) for c, _ in SETTINGS])
def test_settings_that_a_file_cannot_hold_are_named(copy, change, said):
    config = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps(config | {"rank_pattern": {}} | change))
    sentence = refusal(copy)
    assert all(part in sentence for part in said.split(" … "))


def test_tensors_that_a_model_has_no_place_for_are_named(copy):
    arrays = load_file(copy / TENSORS)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    for change, said in [
        ({f"{name}.lora_magnitude_vector": np.ones(3)}, "DoRA's magnitude, for which an adapter"),
        ({"base_model.model.model.norm.weight": np.ones(3)}, "norm.weight' is a whole tensor, for"),
        ({f"{name}.lora_C.weight": np.ones((3, 3))}, "is no A or B of a module, wanted base_model"),
        ({f"{name}.lora_B.weight": np.ones((3, 2, 2))}, "is F32 (3, 2, 2), wanted a matrix of F3"),
        ({f"{name}.lora_B.weight": np.ones((32, 4))}, "has A (3, 32) and B (32, 4), wanted (3, 32"),
        ({f"{name}.lora_B.weight": None}, "'model.layers.0.self_attn.q_proj' has no B"),
        (
            {f"{name.replace('0', '9')}.lora_{h}.weight": np.ones((3, 3)) for h in "AB"},
            "'model.layers.9.self_attn.q_proj' is no module of this model that adapters update",
        ),
        (
            {"base_model.model.lm_head.base_layer.weight": np.ones((70, 32))},
            "'lm_head' is of a matrix (70, 32), wanted (64, 32): was its vocabulary resized?",
        ),
    ]:
        changed = {n: np.float32(a) for n, a in (arrays | change).items() if a is not None}
        save_file(changed, copy / TENSORS)
        assert said in refusal(copy)
    save_file({}, copy / TENSORS)
    assert "there are no tensors" in refusal(copy)


def test_a_vocabulary_that_serves_twice_is_not_updated(tmp_path):
    rows = {"lora_embedding_A": np.ones((3, 64)), "lora_embedding_B": np.ones((32, 3))}
    key = "base_model.model.model.embed_tokens"
    folder = written(tmp_path / "f", {f"{key}.{n}": a for n, a in rows.items()})
    assert "'model.embed_tokens' cannot be updated: this model's output" in refusal(
        folder, base("gemma")
    )
    lost = {"lora_A.weight": np.ones((3, 32)), "lora_B.weight": np.ones((32, 3))}
    lost = {f"base_model.model.model.layers.9.mlp.up_proj.{n}": a for n, a in lost.items()}
    sentence = refusal(written(tmp_path / "h", lost), base("gemma"))
    assert "is no module of this model that adapters update" in sentence
    head = {"lora_A.weight": np.ones((3, 32)), "lora_B.weight": np.ones((64, 3))}
    folder = written(tmp_path / "g", {f"base_model.model.lm_head.{n}": a for n, a in head.items()})
    assert "'lm_head' has no tensor: this model's output matrix is its" in refusal(
        folder, base("gemma")
    )


def test_damaged_files_are_refused(copy, tmp_path):
    whole = (copy / TENSORS).read_bytes()
    for raw, said in [
        (whole[:-9], "is no safetensors file"),
        (b"\xff" * 8 + whole[8:], "is no safetensors file"),
        (b"", "is no safetensors file"),
        (bytes(200_000), "has 200,000 bytes, wanted at most the"),
    ]:
        (copy / TENSORS).write_bytes(raw)
        assert said in refusal(copy)
    (copy / TENSORS).unlink()
    assert "cannot be read: No such file" in refusal(copy)
    (copy / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.bin is not read: save the adapter as safetensors" in refusal(copy)
    for text, said in [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "is [1], wanted an object of settings"),
        (" " * 2_000_000, "has 2000000 bytes, wanted a few thousand"),
    ]:
        (copy / CONFIG).write_text(text)
        assert said in refusal(copy)


def test_types_that_are_no_floats_are_refused(tmp_path):
    folder = written(tmp_path / "f", {})
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({key: np.zeros((3, 32), np.int8)}, folder / TENSORS)
    assert "is I8 (3, 32), wanted a matrix of F32, F16, BF16" in refusal(folder)


def test_a_folder_is_new_and_whole(tmp_path, monkeypatch):
    path, adapter = GOLDEN / "models/qwen3-F16.gguf", GOLDEN / "models/qwen3-lora.gguf"
    model, folder = pyggml.load(path), tmp_path / "folder"
    monkeypatch.setattr("pyggml.lora.peft.exporting.tensors.write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_peft(model, adapter, folder)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    folder.mkdir()
    to_peft(model, adapter, folder)
    with pytest.raises(PyggmlError, match="is there already, wanted a new folder or an empty one"):
        to_peft(model, adapter, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_disk_that_takes_no_more_is_named(tmp_path):
    resource = pytest.importorskip("resource")  # Windows has no limit of this kind
    adapter = GOLDEN / "models/qwen3-lora.gguf"
    model, folder = pyggml.load(GOLDEN / "models/qwen3-F16.gguf"), tmp_path / "folder"
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        with pytest.raises(PyggmlError, match="folder: cannot be written: File too large"):
            to_peft(model, adapter, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not list(tmp_path.iterdir())


def test_architectures_without_a_layout_are_named(tmp_path):
    model = pyggml.load(tiny_models.write(tmp_path / "m.gguf", "falcon-h1"))
    said = refusal(written(tmp_path / "f", {}), model)
    assert "for 'falcon-h1': its converter multiplies every matrix by numbers that" in said
    assert "wanted one of llama, " in said


def test_settings_of_a_mebibyte_are_read_and_larger_ones_are_not(copy):
    """A folder's adapter_config.json has a few hundred bytes."""
    text = (copy / CONFIG).read_text().rstrip()
    (copy / CONFIG).write_text(text + " " * ((1 << 20) - len(text)))
    from_peft(base("granite"), copy, copy / "a.gguf")
    (copy / "a.gguf").unlink()
    (copy / CONFIG).write_text(text + " " * ((1 << 20) + 1 - len(text)))
    assert f"{CONFIG}: has 1048577 bytes, wanted a few thousand" in refusal(copy)


def test_the_words_of_a_tokenizer_are_not_read_without_end(copy):
    """tokenizer_config.json holds the chat template, and may list every token."""
    with (copy / "tokenizer_config.json").open("wb") as file:
        file.write(b"{}")
        file.truncate((64 << 20) + 1)
    assert "tokenizer_config.json: is larger than 64 MiB" in refusal(copy)
