"""`pyggml convert-lora`: both ways from the command line, and its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from pyggml import gguf
from pyggml.cli.terminal.show import size

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL, ADAPTER = GOLDEN / "models/qwen3-F16.gguf", GOLDEN / "models/qwen3-lora.gguf"


def test_there_and_back(pyggml, tmp_path):
    folder, back = tmp_path / "folder", tmp_path / "back.gguf"
    ended = pyggml("convert-lora", "-m", MODEL, ADAPTER, folder, "--base-name", "some/model")
    lines = ended.out.splitlines()
    assert ended.code == 0 and lines[0] == "14 modules of rank 4"
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert lines[1:] == [f"{folder / n}, {size((folder / n).stat().st_size)}" for n in names]
    assert "some/model" in (folder / names[0]).read_text()
    ended = pyggml("convert-lora", "-m", MODEL, folder, back)
    assert ended.out == f"14 modules of rank 4\n{back}, {size(back.stat().st_size)}\n"
    with gguf.open(ADAPTER) as a, gguf.open(back) as b:
        assert all(np.array_equal(a.data(name), b.data(name)) for name in a.tensors)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_the_chat_template_of_a_folder_is_carried_there_and_back(pyggml, tmp_path, place):
    folder, file, back = (tmp_path / name for name in ("folder", "a.gguf", "back"))
    assert pyggml("convert-lora", "-m", MODEL, ADAPTER, folder).code == 0
    assert not (folder / "chat_template.jinja").exists()
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    if place == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        about = {"chat_template": TEMPLATE if place == "config" else named}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    ended = pyggml("convert-lora", "-m", MODEL, folder, file)
    assert ended.out.startswith("14 modules of rank 4, and the chat template\n")
    tools = "tools" if place == "list" else None
    with gguf.open(file) as made:
        keys = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
        assert [made.get(key) for key in keys] == [TEMPLATE, tools]
    ended = pyggml("convert-lora", "-m", MODEL, file, back)
    assert ended.code == 0 and (back / "chat_template.jinja").read_text() == TEMPLATE
    more = back / "additional_chat_templates/tool_use.jinja"
    assert more.exists() == (tools is not None) and f"{back / 'chat_template.jinja'}, " in ended.out
    ended = pyggml("convert-lora", "-m", MODEL, back, file)
    assert ended.code == 0
    with gguf.open(file) as made:
        assert [made.get(key) for key in keys] == [TEMPLATE, tools]


def test_what_a_folder_or_adapter_cannot_carry_is_said(pyggml, tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "a.gguf"
    assert pyggml("convert-lora", "-m", MODEL, ADAPTER, folder).code == 0
    (folder / "chat_template.jinja").write_text("{% for %}")
    ended = pyggml("convert-lora", "-m", MODEL, folder, file)
    assert ended.code == 2 and "chat_template" in ended.err and not file.exists()
    with gguf.open(ADAPTER) as made:
        metadata = {key: field.value for key, field in made.metadata.items()}
        metadata |= {"tokenizer.chat_template": TEMPLATE, "pyggml.chat.inputs": '{"a": 1}'}
        tensors = [(t.name, t.dtype, t.shape, made.data(t.name)) for t in made.tensors.values()]
        gguf.write(file, metadata, tensors)
        del metadata["pyggml.chat.inputs"]
        gguf.write(tmp_path / "pooled.gguf", metadata | {"pyggml.pooling": "mean"}, tensors)
    ended = pyggml("convert-lora", "-m", MODEL, file, tmp_path / "back")
    assert ended.code == 2 and 'were written with {"a": 1} (--chat-template-kwargs)' in ended.err
    assert not (tmp_path / "back").exists()
    ended = pyggml("convert-lora", "-m", MODEL, tmp_path / "pooled.gguf", tmp_path / "back")
    assert ended.code == 0 and "left out: pyggml.pooling, for which PEFT has no place" in ended.out


def test_what_is_wrong_is_one_sentence(pyggml, tmp_path):
    for source, target, said in [
        (tmp_path, MODEL, f"{MODEL}: is the model, wanted another name to write to"),
        (tmp_path, tmp_path / "a.gguf", "adapter_config.json: cannot be read: No such file"),
        (tmp_path / "none", tmp_path / "f", "none: cannot be opened: No such file"),
        (MODEL, tmp_path / "f", f"{MODEL}: general.type is 'model', wanted 'adapter'"),
        (ADAPTER, GOLDEN, f"{GOLDEN}: is there already, wanted a new folder or an empty one"),
    ]:
        ended = pyggml("convert-lora", "-m", MODEL, source, target)
        assert ended.code == 2 and ended.err.count("\n") == 1, ended.err
        assert said in ended.err
    assert list(tmp_path.iterdir()) == []
