"""Adapters on experts, on the token embedding and on an output matrix of its own."""

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError
from pyggml.graph.dtypes import F32
from pyggml.lora import LoraConfig, attach, loss_and_grads, merge

from measures import nmse
from peers.files import GOLDEN
from peers.trial import llama_cpp_logits, trained

MODEL = GOLDEN / "qwen3moe.gguf"  # 6 experts, 32 wide; its output matrix is its own
TIED = GOLDEN / "granitemoe-shared.gguf"
TOKENS = np.random.default_rng(7).integers(0, 64, 24)
ALL = ("attn_q", "ffn_gate_inp", "ffn_up_exps", "ffn_down_exps", "token_embd", "output")


def shaken(adapter, seed=0):
    """An adapter whose A and B are all random."""
    rng = np.random.default_rng(seed)
    for pair in adapter.pairs.values():
        for t in (pair.a, pair.b):
            t.data[:] = rng.normal(0, 0.2, t.shape)
    return adapter


def test_the_shapes_are_llama_cpp_s():
    pairs = attach(pyggml.load(MODEL), LoraConfig(rank=3, modules=ALL)).pairs
    names = list(pairs)
    assert (names[0], names[-1]) == ("token_embd.weight", "output.weight")
    shapes = {name: (p.a.shape, p.b.shape) for name, p in pairs.items()}
    assert shapes["blk.1.ffn_up_exps.weight"] == ((6, 3, 32), (6, 24, 3))
    assert shapes["blk.1.ffn_down_exps.weight"] == ((6, 3, 24), (6, 32, 3))
    assert shapes["blk.0.ffn_gate_inp.weight"] == ((3, 32), (6, 3))
    assert shapes["token_embd.weight"] == ((64, 3), (32, 3))
    assert shapes["output.weight"] == ((3, 32), (64, 3))


def test_experts_and_routers_wait_until_they_are_named():
    model = pyggml.load(MODEL)
    usual = attach(model, LoraConfig(rank=2)).pairs
    assert {name.split(".")[2] for name in usual} == {"attn_q", "attn_k", "attn_v", "attn_output"}
    assert {"ffn_gate_inp", "ffn_up_exps"} <= set(model.parts.decoder.modules)


def test_nothing_changes_at_first_and_unseen_tokens_never_do():
    plain = pyggml.load(MODEL)
    adapter = attach(plain, LoraConfig(rank=3, modules=ALL))
    model = adapter.model
    np.testing.assert_array_equal(model.logits(TOKENS), plain.logits(TOKENS))
    table, experts = adapter.pairs["token_embd.weight"], adapter.pairs["blk.0.ffn_up_exps.weight"]
    assert not table.a.data.any() and 0.8 < table.b.data.std() < 1.2
    assert not experts.b.data.any() and np.abs(experts.a.data).max() <= 32**-0.5
    assert len({experts.a.data[e].tobytes() for e in range(6)}) == 6
    _, grads = loss_and_grads(model, TOKENS)
    touched = np.abs(grads["token_embd.weight.lora_a"]).max(axis=1) > 0
    assert set(np.flatnonzero(touched)) <= set(TOKENS[:-1].tolist()) and touched.any()


@pytest.mark.parametrize(
    "base", ["token_embd.weight", "output.weight", "blk.0.ffn_gate_inp.weight"]
)
def test_an_update_is_the_changed_weight(base, tmp_path):
    """W + scale · BA in the file gives the logits of the adapter."""
    model = pyggml.load(MODEL, compute="f32")
    adapter = shaken(attach(model, LoraConfig(rank=3, alpha=6.0, modules=(base.split(".")[-2],))))
    model = adapter.model
    pair = adapter.pairs[base]
    update = pair.a.data @ pair.b.data.T if "embd" in base else pair.b.data @ pair.a.data
    updates = {n: 2.0 * (p.b.data @ p.a.data) for n, p in adapter.pairs.items() if n != base}
    updates[base] = 2.0 * update
    with gguf.open(MODEL) as file:
        tensors = [
            (n, F32, i.shape, np.asarray(file.data(n), np.float32) + updates.get(n, 0))
            for n, i in file.tensors.items()
        ]
        gguf.write(tmp_path / "merged.gguf", dict(file.metadata), tensors)
    merged = pyggml.load(tmp_path / "merged.gguf", compute="f32").logits(TOKENS)
    assert nmse(model.logits(TOKENS), merged) < 1e-10
    assert nmse(pyggml.load(MODEL).logits(TOKENS), merged) > 1e-3


def test_gradients_are_slopes_of_the_loss():
    model = pyggml.load(MODEL, compute="f32")
    adapter = shaken(attach(model, LoraConfig(rank=2, alpha=2.0, modules=ALL)))
    model = adapter.model
    _, grads = loss_and_grads(model, TOKENS)
    rng = np.random.default_rng(3)
    for name in ("token_embd.weight", "output.weight", "blk.1.ffn_down_exps.weight"):
        for half, t in zip("ab", (adapter.pairs[name].a, adapter.pairs[name].b), strict=True):
            start, along = t.data.copy(), rng.standard_normal(t.shape)
            along /= np.linalg.norm(along)
            ends = []
            for side in (1, -1):
                t.data[:] = start + side * 0.01 * along
                ends.append(loss_and_grads(model, TOKENS)[0])
            t.data[:] = start
            g = grads[f"{name}.lora_{half}"]
            slope = (ends[0] - ends[1]) / 0.02
            assert abs(np.sum(g * along) - slope) < 5e-3 * np.linalg.norm(g), (name, half)


def test_every_shape_merges(tmp_path):
    """Experts, tables and matrices, of a model in F32, where nothing is lost."""
    from pyggml.requantize import requantize

    requantize(MODEL, tmp_path / "model.gguf", "F32")
    model = pyggml.load(tmp_path / "model.gguf", compute="f32")
    adapter = shaken(attach(model, LoraConfig(rank=3, alpha=6.0, modules=ALL)))
    merge(adapter.model, tmp_path / "merged.gguf")
    merged = pyggml.load(tmp_path / "merged.gguf", compute="f32")
    assert nmse(merged.logits(TOKENS), adapter.model.logits(TOKENS)) < 1e-9
    assert nmse(merged.logits(TOKENS), model.logits(TOKENS)) > 1e-3


def test_the_file_reads_back_as_the_same_adapter(tmp_path):
    model = pyggml.load(MODEL)
    adapter = shaken(attach(model, LoraConfig(rank=3, alpha=6.0, modules=ALL)))
    adapter.save(tmp_path / "a.gguf")
    again = pyggml.load(MODEL, adapter=tmp_path / "a.gguf")
    assert list(again.adapters[0]) == list(adapter.pairs)
    assert {p.scale for p in again.adapters[0].values()} == {2.0}
    np.testing.assert_array_equal(again.logits(TOKENS), adapter.model.logits(TOKENS))


def write_adapter(path, architecture, tensors, more=None):
    keys = {"general.type": "adapter", "adapter.type": "lora"}
    keys |= {"general.architecture": architecture, "adapter.lora.alpha": np.float32(2.0)}
    keys |= more or {}
    sources = [(n, F32, shape, np.ones(shape, np.float32)) for n, shape in tensors.items()]
    gguf.write(path, keys, sources)
    return path


MISFITS = [
    ("blk.0.ffn_up_exps", (3, 32), (24, 3), r"A \(3, 32\) and B \(24, 3\) do not make \(6, 24, 32"),
    ("blk.0.ffn_up_exps", (5, 3, 32), (5, 24, 3), r"do not make \(6, 24, 32\)"),
    ("blk.0.ffn_up_exps", (6, 3, 32), (6, 24, 2), r"do not make \(6, 24, 32\)"),
    ("token_embd", (3, 32), (64, 3), r"A \(3, 32\) and B \(64, 3\) do not make \(64, 32\)"),
    ("blk.0.attn_norm", (1, 32), (1, 1), "no linear module, so an update of it would have no"),
    ("blk.0.attn_q_norm", (1, 16), (1, 1), "no linear module"),
]


@pytest.mark.parametrize("name, a, b, message", MISFITS)
def test_files_that_do_not_fit_are_refused(tmp_path, name, a, b, message):
    tensors = {f"{name}.weight.lora_a": a, f"{name}.weight.lora_b": b}
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", tensors)
    with pytest.raises(AdapterError, match=message):
        pyggml.load(MODEL, adapter=path)


def test_a_file_without_updates_is_refused(tmp_path):
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", {})
    with pytest.raises(AdapterError, match="no tensors, wanted an A and a B of at least one"):
        pyggml.load(MODEL, adapter=path)


FINITE = "wanted a finite float"
KEYS = [
    ("general.type", np.arange(3), "is an array of 3, wanted 'adapter'"),
    ("general.type", ["adapter"], "is an array of 1, wanted 'adapter'"),
    ("general.architecture", "qwen3", "is 'qwen3', wanted 'qwen3moe'"),
    ("general.architecture", np.arange(3), "is an array of 3, wanted 'qwen3moe'"),
    ("adapter.type", 1, "is 1, wanted 'lora'"),
    ("adapter.lora.alpha", "much", f"is 'much', {FINITE}"),
    ("adapter.lora.alpha", np.arange(3), f"is an array of 3, {FINITE}"),
    ("adapter.lora.alpha", ["2"], f"is an array of 1, {FINITE}"),
    ("adapter.lora.alpha", np.float32("inf"), f"is inf, {FINITE}"),
    ("adapter.alora.invocation_tokens", np.array([1, 2], np.uint32), "is there, wanted an adapter"),
]


@pytest.mark.parametrize("key, value, message", KEYS)
def test_keys_that_do_not_fit_are_refused(tmp_path, key, value, message):
    tensors = {"blk.0.attn_q.weight.lora_a": (3, 32), "blk.0.attn_q.weight.lora_b": (64, 3)}
    good = write_adapter(tmp_path / "good.gguf", "qwen3moe", tensors)
    pyggml.load(MODEL, adapter=good)
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", tensors, {key: value})
    with pytest.raises(AdapterError, match=f"{key} {message}"):
        pyggml.load(MODEL, adapter=path)


@pytest.mark.parametrize("name, message", [("token_embd", "would apply"), ("output", "no tensor")])
def test_files_for_a_tied_output_are_refused(tmp_path, name, message):
    """llama.cpp stops at the first and rejects the second."""
    a, b = ((64, 3), (32, 3)) if name == "token_embd" else ((3, 32), (64, 3))
    tensors = {f"{name}.weight.lora_a": a, f"{name}.weight.lora_b": b}
    path = write_adapter(tmp_path / "a.gguf", "granitemoe", tensors)
    with pytest.raises(AdapterError, match=message):
        pyggml.load(TIED, adapter=path)


@pytest.mark.interop
def test_llama_cpp_gives_our_logits(tmp_path):
    """With an adapter on experts, router, token embedding and output, after training."""
    from pyggml.requantize import requantize

    path = tmp_path / "model.gguf"
    requantize(MODEL, path, "F32")
    model = pyggml.load(path, compute="f32")
    adapter = trained(model, modules=ALL)
    adapter.save(tmp_path / "adapter.gguf")
    ours, plain = adapter.model.logits(TOKENS), pyggml.load(path, compute="f32").logits(TOKENS)
    assert nmse(ours, plain) > 1e-2, "the adapter does next to nothing"
    assert nmse(llama_cpp_logits(path, TOKENS, tmp_path / "adapter.gguf"), ours) < 1e-6
