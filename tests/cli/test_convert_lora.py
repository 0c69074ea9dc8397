"""`pyggml convert-lora`: both ways from the command line, and its refusals."""

from pathlib import Path

import numpy as np

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
