"""Merged models: the logits of base and adapters, packed once, and nothing lost on the way."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from importances import BY_IMPORTANCE, random_importance

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, PyggmlError, QuantError
from pyggml.lora import LoraConfig, attach, merge
from pyggml.lora.adapter.merge import merged_weight
from pyggml.quants import dequantize
from pyggml.requantize import FILE_TYPES, requantize, rewrite

from measures import nmse
from peers.trial import llama_cpp_logits

GOLDEN = Path(__file__).parents[1] / "golden/models"
ARCHITECTURES = ["llama", "qwen3moe", "gemma3", "gpt2", "lfm2", "mamba", "phi3"]


def with_adapters(path, adapter):
    """A model, exactly computed, with one adapter twice: at 0.7 and at −0.2 of its strength."""
    return pyggml.load(path, [(adapter, 0.7), (adapter, -0.2)], "f32")


@pytest.fixture(scope="module")
def golden():
    """A model in F16 that every clone has, with its adapter."""
    return with_adapters(GOLDEN / "qwen3-F16.gguf", GOLDEN / "qwen3-lora.gguf")


def random_adapter(model, path):
    """An adapter whose numbers are all random."""
    adapter = attach(model, LoraConfig(rank=3, alpha=5.0))
    p = adapter.parameters.data
    p[:] = np.random.default_rng(0).normal(0, 0.1, p.size)
    adapter.save(path)
    return path


# -- logits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_merged_model_gives_the_logits_of_base_and_adapters(shared, tmp_path, name):
    path, adapter = (shared / f"fixtures/{name}-{part}.gguf" for part in ("F16", "lora"))
    if name == "mamba":  # which has no adapter there
        adapter = random_adapter(pyggml.load(path), tmp_path / "a.gguf")
    model = with_adapters(path, adapter)
    tokens = np.load(shared / f"fixtures/{name}-golden.npz")["tokens"]
    merge(model, tmp_path / "m.gguf", "F32")
    merged = pyggml.load(tmp_path / "m.gguf", compute="f32")
    wanted = model.logits(tokens)
    assert nmse(merged.logits(tokens), wanted) < 1e-10
    assert nmse(pyggml.load(path, compute="f32").logits(tokens), wanted) > 1e-5
    assert merged.file.get("general.file_type") == 0
    kept = {k: f for k, f in model.file.metadata.items() if k != "general.file_type"}
    assert kept.items() <= merged.file.metadata.items()


@pytest.mark.parametrize("name", ["llama-Q8_0", "lfm2-Q4_K_M"])
def test_a_packed_base_is_merged_exactly_as_f32(tmp_path, name):
    model = pyggml.load(GOLDEN / f"{name}.gguf", compute="f32")
    model = with_adapters(model.file.path, random_adapter(model, tmp_path / "a.gguf"))
    merge(model, tmp_path / "m.gguf", "F32")
    merged = pyggml.load(tmp_path / "m.gguf", compute="f32")
    assert nmse(merged.logits(np.arange(20)), model.logits(np.arange(20))) < 1e-10


# -- types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q2_K", "BF16"])
def test_the_sums_are_packed_once(golden, tmp_path, file_type):
    """The same file as by way of one in F32, which loses nothing; either way of rounding."""
    merge(golden, tmp_path / "at-once.gguf", file_type, rounding="nearest")
    merge(golden, tmp_path / "f32.gguf", "F32")
    requantize(tmp_path / "f32.gguf", tmp_path / "two-steps.gguf", file_type)
    assert (tmp_path / "at-once.gguf").read_bytes() == (tmp_path / "two-steps.gguf").read_bytes()
    merge(golden, tmp_path / "at-once.gguf", file_type)
    with gguf.open(tmp_path / "f32.gguf") as merged, gguf.open(golden.file.path) as base:
        rewrite(merged, tmp_path / "two-steps.gguf", file_type, base=base)
    at_once, in_two = (gguf.open(tmp_path / f"{n}.gguf") for n in ("at-once", "two-steps"))
    for name in at_once.tensors:
        np.testing.assert_array_equal(at_once.data(name), in_two.data(name))


def test_every_tensor_keeps_its_type_unless_told(golden, tmp_path):
    heard = []
    merge(golden, tmp_path / "m.gguf", progress=lambda *about: heard.append(about))
    with gguf.open(tmp_path / "m.gguf") as file:
        types = {n: i.dtype for n, i in file.tensors.items()}
        assert types == {n: i.dtype for n, i in golden.file.tensors.items()}
        assert file.metadata == golden.file.metadata
        assert heard == [(n, d, d) for n, d in types.items()]
        name = "blk.0.attn_norm.weight"
        np.testing.assert_array_equal(file.data(name), golden.file.data(name))


def test_a_packed_base_gets_any_type_and_the_loss_is_said(tmp_path):
    model = pyggml.load(GOLDEN / "llama-Q8_0.gguf")
    model = with_adapters(model.file.path, random_adapter(model, tmp_path / "a.gguf"))
    for file_type, error in [("Q4_0", 0.08), ("Q4_K_M", 0.06), ("F16", 3e-4), ("F32", 0)]:
        losses = merge(model, tmp_path / "m.gguf", file_type)
        assert 0.5 * error <= losses.sums.error <= 1.5 * error
        assert losses.sums.share == pytest.approx(1, abs=0.01)
        written = pyggml.load(tmp_path / "m.gguf").file
        assert written.get("general.file_type") == FILE_TYPES[file_type].number
        meant = merged_weight(model, "blk.1.ffn_down.weight")
        info = written.tensors["blk.1.ffn_down.weight"]
        x = dequantize(written.data(info.name), info.dtype.name).reshape(meant.shape)
        (loss,) = (t for t in losses.tensors if t.name == info.name)
        wanted = np.linalg.norm(x - meant) / np.linalg.norm(meant)
        assert loss.sums.error == pytest.approx(wanted, rel=1e-4, abs=1e-12)
        assert loss.dtype is info.dtype
    assert {t.name for t in losses.updated} == set(model.adapters[0])


def test_a_small_update_is_kept_in_a_coarse_type_and_lost_by_plain_rounding(tmp_path):
    """The numbers that are written are the update's along the update, and so are the logits."""
    base = pyggml.load(GOLDEN / "lfm2-Q4_K_M.gguf", compute="f32")
    adapter = attach(base, LoraConfig(rank=3, alpha=5.0))
    p = adapter.parameters.data
    p[:] = np.random.default_rng(0).normal(0, 0.02, p.size)
    kept = merge(adapter.model, tmp_path / "kept.gguf")
    lost = merge(adapter.model, tmp_path / "lost.gguf", rounding="nearest")
    assert kept.sums.share == pytest.approx(1, abs=0.02) and not kept.is_lost
    assert kept.better is None and kept.least.sums.share > 0.9
    assert lost.sums.share < 0.5 and lost.is_lost and lost.better == "Q8_0"
    merge(adapter.model, tmp_path / "better.gguf", "Q8_0", rounding="nearest")


def test_another_way_of_rounding_is_refused(golden, tmp_path):
    with pytest.raises(QuantError, match="rounding is 'up', wanted update or nearest"):
        merge(golden, tmp_path / "m.gguf", rounding="up")


@pytest.mark.filterwarnings("ignore:.*is 0, as where a download broke off")  # its blocks are 0
def test_a_type_that_nothing_packs_is_refused_before_anything_is_written(golden, tmp_path):
    with pytest.raises(QuantError, match="'Q9' is no file type; known are F32, F16, BF16"):
        merge(golden, tmp_path / "m.gguf", "Q9")
    adapter, name = GOLDEN / "qwen3-lora.gguf", "blk.0.attn_q.weight"
    with gguf.open(GOLDEN / "qwen3-F16.gguf") as file:
        tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
        iq1 = pyggml.graph.dtypes.DTYPES["IQ1_S"]
        shape = file.tensors[name].shape
        blocks = np.zeros((shape[0], iq1.row_bytes(shape[1])), np.uint8)
        tensors = [(n, iq1, s, blocks) if n == name else (n, d, s, x) for n, d, s, x in tensors]
        gguf.write(tmp_path / "iq1.gguf", file.metadata, tensors)
    model = with_adapters(tmp_path / "iq1.gguf", adapter)
    with pytest.raises(QuantError, match=f"IQ1_S is packed by an importance .* for '{name}'$"):
        merge(model, tmp_path / "m.gguf")
    merge(model, tmp_path / "m.gguf", "F32")


# -- files --------------------------------------------------------------------------------------


def test_the_base_is_not_written_over(golden, tmp_path):
    base = tmp_path / "base.gguf"
    base.write_bytes((GOLDEN / "qwen3-F16.gguf").read_bytes())
    link = tmp_path / "link.gguf"
    link.hardlink_to(base)
    model = with_adapters(base, GOLDEN / "qwen3-lora.gguf")
    for path in (base, link):
        with pytest.raises(ConfigError, match="is the file to read from; wanted another name"):
            merge(model, path)
    assert base.read_bytes() == (GOLDEN / "qwen3-F16.gguf").read_bytes()


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_end_in_the_middle_leaves_the_old_file(golden, tmp_path, fault):
    (tmp_path / "m.gguf").write_text("old")

    def progress(name, old, new):
        if name.startswith("blk.1"):
            raise fault

    kind = KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else PyggmlError
    with pytest.raises(kind):
        merge(golden, tmp_path / "m.gguf", "Q8_0", progress)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert (tmp_path / "m.gguf").read_text() == "old"


def test_memory_is_that_of_the_largest_tensor(golden, tmp_path):
    largest = 4 * max(np.prod(i.shape) for i in golden.file.tensors.values())
    merge(golden, tmp_path / "m.gguf", "F32")  # imports and compiles
    tracemalloc.start()
    merge(golden, tmp_path / "m.gguf", "F32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * largest < (tmp_path / "m.gguf").stat().st_size


# -- llama.cpp ------------------------------------------------------------------------------------


@pytest.mark.interop
@pytest.mark.parametrize("file_type", list(FILE_TYPES))
def test_llama_cpp_gives_our_logits_of_a_merged_model(golden, tmp_path, file_type):
    tokens = np.arange(40) * 7 % 400
    given = random_importance(golden.file.path) if file_type in BY_IMPORTANCE else None
    merge(golden, tmp_path / "m.gguf", file_type, importance=given)
    ours = pyggml.load(tmp_path / "m.gguf", compute="f32").logits(tokens)
    assert nmse(llama_cpp_logits(tmp_path / "m.gguf", tokens), ours) < 2e-3
