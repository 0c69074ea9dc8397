"""Logits, adapters and gradients of real architectures against PyTorch and llama.cpp.

Float32 arithmetic on the weights of a file must meet PyTorch on the same weights; llama.cpp also
rounds activations, so its own logits are met at its own distance from those.
"""

import filecmp
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cases import cases

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.backward import build_backward
from pyggml.graph.arrays import array
from pyggml.graph.call import Call
from pyggml.graph.tensor import leaf
from pyggml.models import Inputs, build_loss
from pyggml.models.texts import fill
from pyggml.runtime import results

from measures import nmse

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt2"]
ARCHITECTURES += ["granite", "lfm2", "olmo2", "phi3", "smollm3"]
EXACT = {"F16": "f32_hf", "Q8_0": "Q8_0_exact", "Q4_K_M": "Q4_K_M_exact"}
# llama.cpp computed Q8_0_exact and Q4_K_M_exact, and takes a GELU from a table of halves.
ROUNDED_GELU = {"gemma2": 1.2e-7, "gemma3": 3.5e-7, "gpt2": 2e-7}  # measured: half of it
SAME_GELU = {"gemma2": 1.5e-9, "gemma3": 3.5e-8, "gpt2": 4.5e-9}  # likewise, with that table
ROUNDING = 5e-12  # NMSE of float32 logits; measured: at most 2.1e-12
COMMITTED = Path(__file__).parents[1] / "golden/models"


@pytest.mark.parametrize(
    "architecture, kind", cases(product([*ARCHITECTURES, "mamba"], EXACT), [("llama", "Q8_0")])
)
def test_logits(architecture, kind, golden_file, golden):
    model = pyggml.load(golden_file(f"{architecture}-{kind}.gguf"), compute="f32")
    wanted = golden(architecture)
    found = model.logits(wanted["tokens"])
    assert found.shape == (48, 512)
    assert found.dtype == np.float32
    most = ROUNDING if kind == "F16" else ROUNDED_GELU.get(architecture, ROUNDING)
    assert nmse(found[wanted["rows"]], wanted[EXACT[kind]]) < most


def gelu_of_halves(x):
    """ggml's table: the GELU of x rounded to a half, itself a half."""
    h = x.astype(np.float16).astype(np.float32)
    y = h / 2 * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (h + np.float32(0.044715) * h**3)))
    return np.where(np.abs(x) < 10, y.astype(np.float16), np.maximum(x, 0)).astype(np.float32)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("architecture", list(ROUNDED_GELU))
def test_the_table_of_gelus_is_what_is_left(architecture, kind, golden_file, golden, monkeypatch):
    """With that table in place of ours the logits are those of llama.cpp."""
    bound = CPU.bind

    def bind(self, node, *memory):
        if node.op.name not in ("gelu", "geglu"):
            return bound(self, node, *memory)
        out, first, *up = array(node), *map(array, node.src)
        return Call(lambda: np.copyto(out, gelu_of_halves(first) * (up[0] if up else 1)))

    model = pyggml.load(golden_file(f"{architecture}-{kind}.gguf"), compute="f32")
    wanted = golden(architecture)
    monkeypatch.setattr(CPU, "bind", bind)
    error = nmse(model.logits(wanted["tokens"])[wanted["rows"]], wanted[EXACT[kind]])
    assert error < SAME_GELU[architecture]


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["qwen3"]))
def test_logits_with_an_adapter(architecture, golden_file, golden):
    adapter = golden_file(f"{architecture}-lora.gguf")
    model = pyggml.load(golden_file(f"{architecture}-F16.gguf"), adapter, compute="f32")
    wanted = golden(architecture)
    found = model.logits(wanted["tokens"])[wanted["rows"]]
    assert nmse(found, wanted["f32_hf_lora"]) < ROUNDING
    assert nmse(found, wanted["f32_hf"]) > 1e-4, "the adapter changes something"


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_is_met_at_its_own_distance(architecture, kind, golden_file, golden):
    path = golden_file(f"{architecture}-{kind}.gguf")
    adapter = golden_file(f"{architecture}-lora.gguf")
    wanted = golden(architecture)
    if f"{kind}+lora" not in wanted:
        pytest.skip("llama.cpp's own logits are in ../shared only")
    rounding = nmse(wanted[EXACT[kind]], wanted[kind])
    assert (
        nmse(pyggml.load(path, compute="f32").logits(wanted["tokens"]), wanted[kind])
        < 1.01 * rounding
    )
    found = pyggml.load(path, adapter, compute="f32").logits(wanted["tokens"])
    assert nmse(found, wanted[f"{kind}+lora"]) < 1.2 * rounding  # measured: at most 1.11


@pytest.mark.parametrize(
    "architecture, fused", cases(product(ARCHITECTURES, [True, False]), [("qwen3", True)])
)
def test_gradients_of_an_adapter(architecture, fused, golden_file, golden):
    """d(mean next-token cross entropy over 47 targets) / d(adapter), as PyTorch has it."""
    adapter = golden_file(f"{architecture}-lora.gguf")
    model = pyggml.load(golden_file(f"{architecture}-F16.gguf"), adapter, compute="f32")
    wanted = golden(architecture)
    inputs = Inputs.empty(47)
    fill(inputs, wanted["tokens"][:-1])
    targets, share = leaf(wanted["tokens"][1:]), leaf(np.full(47, 1 / 47, np.float32))
    trained = () if fused else [f"{model.parts.output_name}.weight"]
    graph = build_loss(model.parts, inputs, targets, share, model.adapters, trained)
    pairs = model.adapters[0]
    tensors = [t for p in pairs.values() for t in (p.a, p.b)]
    value, *grads = results(build_backward(graph, tensors))
    assert value == pytest.approx(float(wanted["lora_loss"]), rel=3e-7)
    names = {k.removeprefix("grad/") for k in wanted if k.startswith("grad/")}
    assert {t.name for t in tensors} == names
    for t, g in zip(tensors, grads, strict=True):
        exact = wanted[f"grad/{t.name}"]
        assert np.linalg.norm(g - exact) < 8e-6 * np.linalg.norm(exact), t.name


# -- what a clone carries -----------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(COMMITTED.iterdir()), ids=lambda p: p.name)
def test_the_committed_part_is_a_part_of_the_full_set(file, shared):
    full = shared / "fixtures" / file.name
    if file.suffix == ".gguf":
        assert filecmp.cmp(file, full, shallow=False)
        return
    with np.load(file) as kept, np.load(full) as whole:
        for key in set(kept.files) - {"rows"}:
            wanted = whole[key]
            few = kept[key].shape != wanted.shape
            np.testing.assert_array_equal(kept[key], wanted[kept["rows"]] if few else wanted)


def test_the_committed_part_is_small():
    sizes = [f.stat().st_size for f in COMMITTED.parent.rglob("*") if f.is_file()]
    assert sum(sizes) < 16_000_000  # 92 architectures
