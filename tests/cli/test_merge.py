"""`pyggml merge`: what it prints, what it writes, and what it refuses."""

import numpy as np
import pytest

import pyggml as library
from pyggml import gguf
from pyggml.cli.terminal.show import size
from pyggml.lora import LoraConfig, attach

from measures import nmse


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """An adapter of two modules, whose numbers are random."""
    made = attach(library.load(tiny), LoraConfig(rank=2, alpha=3.0, modules=("attn_q", "ffn_up")))
    made.parameters.data[:] = np.random.default_rng(0).normal(0, 0.3, made.parameters.data.size)
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    made.save(path)
    return path


def test_merge_says_each_tensor_and_writes_the_sum(pyggml, tiny, adapter, tmp_path):
    out = tmp_path / "m.gguf"
    given = ("--lora", f"{adapter}:0.5", "--lora", adapter)
    ended = pyggml("merge", "-m", tiny, *given, "-o", out, "--type", "f16", "--tensors")
    lines = ended.out.splitlines()
    (line,) = (x for x in lines if x[0] == "[" and "blk.0.ffn_up.weight" in x)
    assert "(64, 32)         F32 → F16, 8.2 kB → 4.1 kB, 2 updates, 100 % of it written" in line
    assert "update     100 % of it is in the file; least 100 %, blk." in ended.out
    (line,) = (x for x in lines if "blk.0.ffn_down.weight" in x)
    assert "F32 → F16, 8.2 kB → 4.1 kB, error 0.0" in line
    assert lines[-2].startswith(f"{out}: {size(out.stat().st_size)}, ")
    assert lines[-1] == f"with {adapter}:0.5, {adapter}"
    both = library.load(tiny, [(adapter, 0.5), adapter], "f32").logits([1, 2, 3])
    assert nmse(library.load(out, compute="f32").logits([1, 2, 3]), both) < 1e-5


def test_merge_packs_by_importance(pyggml, tiny, text, adapter, tmp_path):
    importance, out = tmp_path / "i.gguf", tmp_path / "m.gguf"
    measured = ("-m", tiny, "-f", text, "-o", importance, "--ctx", 16, "--chunks", 2)
    assert pyggml("imatrix", *measured).code == 0
    given = ("-m", tiny, "--lora", adapter, "-o", out, "--type", "q4_0", "--imatrix", importance)
    assert pyggml("merge", *given).code == 0
    with gguf.open(out) as file:
        assert file.get("quantize.imatrix.chunks_count") == 2


def test_merge_keeps_every_type_by_default(pyggml, tiny, adapter, tmp_path):
    given = ("merge", "-m", tiny, "--lora", adapter, "-o", tmp_path / "m.gguf")
    ended = pyggml(*given, "--tensors")
    lines = ended.out.splitlines()
    assert sum(" kept" in line for line in lines) == len(lines) - 4
    assert sum(line.endswith("kept, 1 update, 100 % of it written") for line in lines) == 4
    assert pyggml(*given).out.splitlines() == lines[-4:]  # a line a tensor is asked for


def test_merge_onto_a_coarse_base_keeps_the_update_or_warns(pyggml, tiny, adapter, tmp_path):
    packed, out = tmp_path / "packed.gguf", tmp_path / "m.gguf"
    assert pyggml("quantize", tiny, packed, "Q4_0").code == 0
    given = ("merge", "-m", packed, "--lora", f"{adapter}:0.01", "-o", out)
    ended = pyggml(*given)
    assert ended.code == 0 and "warning" not in ended.out
    assert ended.out.splitlines()[0].startswith("update     ")
    ended = pyggml(*given, "--rounding", "nearest")
    assert "warning    much of what was learned is lost in Q4_0: Q8_0 keeps it" in ended.out
    assert "and so does --rounding update" in ended.out
    for file_type in ("Q8_0", "F16"):  # any type, without a word, and with the one of before
        assert pyggml(*given, "--type", file_type, "--rounding", "nearest").code == 0
        assert pyggml(*given, "--type", file_type, "--allow-requantize").code == 0


def test_merge_of_no_adapter_writes_the_model_itself(pyggml, tiny, tmp_path):
    out, packed = tmp_path / "m.gguf", tmp_path / "packed.gguf"
    ended = pyggml("merge", "-m", tiny, "-o", out)
    assert ended.out.endswith("\nwithout an adapter (--lora): the model's own weights\n")
    assert out.read_bytes() == tiny.read_bytes()
    assert pyggml("quantize", tiny, packed, "Q8_0").code == 0
    ended = pyggml("merge", "-m", tiny, "-o", out, "--type", "Q8_0")
    assert "own weights, as Q8_0\n" in ended.out and out.read_bytes() == packed.read_bytes()
    for options, said in (
        (("--type", "Q4_0"), "--allow-requantize is off"),
        (("--imatrix", packed), "--imatrix: nothing is packed without --lora or --type"),
    ):
        ended = pyggml("merge", "-m", packed, "-o", out, *options)
        assert ended.code == 2 and said in ended.err


def test_merge_refuses_in_one_sentence(pyggml, tiny, adapter, tmp_path):
    for model, options, said in [
        (tiny, ("-o", tiny), f"{tiny}: is the model, wanted another name to write to"),
        (tiny, ("-o", adapter), f"{adapter}: is the adapter, wanted another name to write to"),
        (tiny, ("--type", "Q9"), "'Q9' is no file type; known are F32, "),
        (tiny, ("--lora", tiny), "wanted 'lora'; it is a whole model: open it by itself, "),
    ]:
        given = ("--lora", adapter, "-o", tmp_path / "m.gguf", *options)
        ended = pyggml("merge", "-m", model, *given)
        assert ended.code == 2 and ended.err.count("\n") == 1
        assert said in ended.err
    assert not (tmp_path / "m.gguf").exists()
    out = tmp_path / "new/m.gguf"
    for given in (
        ("merge", "-m", tiny, "--lora", adapter, "-o", out, "--type", "Q4_KM"),
        ("quantize", tiny, out, "Q4_KM"),
    ):
        ended = pyggml(*given)
        assert ended.code == 2 and "did you mean 'Q4_K_M'?" in ended.err
        assert not out.parent.exists(), "nothing is made for a type that is none"
