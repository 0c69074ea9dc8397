"""Mixtures of experts: quantised weights, what a router is told, and files that cannot be."""

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import ModelError
from pyggml.generation import Session
from pyggml.graph.dtypes import F16, F32
from pyggml.requantize import requantize

from measures import nmse
from peers.files import GOLDEN
from peers.trial import adapted, llama_cpp_logits, trained

MIXTURES = ["mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe-shared"]
TOKENS = np.random.default_rng(7).integers(0, 64, 24)


@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_are_the_unpacked_ones(name, tmp_path):
    packed, plain = tmp_path / "q8.gguf", tmp_path / "f32.gguf"
    requantize(GOLDEN / f"{name}.gguf", packed, "Q8_0")
    requantize(packed, plain, "F32")
    model = pyggml.load(packed, compute="f32")
    kinds = {n: w.dtype.name for n, w in model.parts.weights.items()}
    assert kinds["blk.0.ffn_up_exps.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32", "routers are never packed"
    wanted = pyggml.load(plain, compute="f32").logits(TOKENS)
    assert nmse(model.logits(TOKENS), wanted) < 1e-10
    session = Session(model, 24)
    for start, end in ((0, 9), (9, 10), (10, 24)):
        assert nmse(session.feed(TOKENS[start:end]), wanted[end - 1]) < 1e-10


ROUTED = [*MIXTURES, "granitemoe", "lfm2moe", "qwen35moe", "qwen3next", "gpt-oss"]
N_ROUNDINGS, HALF_A_STEP = 8, 2.0**-9


def choices(path, compute, rng=None):
    """What decides which experts the golden tokens get, without and with the golden adapter:
    (2, blocks, tokens, experts). With rng, matrices are moved by up to half a step of bfloat16, so
    that they round in another way."""

    def moved(x):
        factors = 1 if rng is None else 1 + rng.uniform(-HALF_A_STEP, HALF_A_STEP, x.shape)
        return (x * factors).astype(x.dtype)

    model = pyggml.load(path, compute=compute)
    for w in model.parts.weights.values():
        w.data = moved(w.data) if w.dtype is F16 else w.data
    with np.load(path.with_suffix(".npz")) as arrays:
        values = {n: moved(a) if n.startswith("lora/") else a for n, a in arrays.items()}
    weights = model.parts.weights.items()
    biases = [w.data[None] for n, w in weights if n.endswith("exp_probs_b.bias")]
    names = [n for n in model.activations if n.endswith("ffn_gate_inp")]
    scores = []
    for each in (model, adapted(model, values)):
        with each.trace("*ffn_gate_inp") as t:
            each.logits(TOKENS)
        scores.append([t[n] for n in names])
    return 1 / (1 + np.exp(-np.array(scores))) + biases if biases else np.array(scores)


def margins(scores, order, n_used):
    """How far the last of the experts that `order` has first is before the best of the others."""
    ordered = np.take_along_axis(scores, order, -1)
    return ordered[..., :n_used].min(-1) - ordered[..., n_used:].max(-1)


@pytest.mark.parametrize("name", ROUTED)
def test_no_choice_of_a_golden_mixture_is_near_a_tie(name):
    """Else another rounding gives a token another expert, and the gradients say nothing."""
    path, rng = GOLDEN / f"{name}.gguf", np.random.default_rng(0)
    with gguf.open(path) as file:
        n_used = next(f.value for k, f in file.metadata.items() if k.endswith("used_count"))
    exact = choices(path, "f32")
    order = np.argsort(-exact, axis=-1)
    gaps = margins(exact, order, n_used)
    found = [margins(choices(path, "bf16", rng), order, n_used) for _ in range(N_ROUNDINGS)]
    noise = np.sqrt(np.mean((np.array(found) - gaps) ** 2, axis=0))
    assert (gaps > 3 * noise).all(), (gaps / noise).min()


@pytest.fixture
def in_one(tmp_path):
    """Write a golden mixture with gates and ups in one tensor, as the converter's
    --fuse-gate-up-exps does; the tensors are F32."""

    def write(name):
        requantize(GOLDEN / f"{name}.gguf", tmp_path / "apart.gguf", "F32")
        with gguf.open(tmp_path / "apart.gguf") as file:
            arrays = {n: np.array(file.data(n)) for n in file.tensors}
            metadata = dict(file.metadata)
        for n in [n for n in arrays if n.endswith("ffn_gate_exps.weight")]:
            both = arrays.pop(n), arrays.pop(n.replace("gate", "up"))
            arrays[n.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
        path = tmp_path / "one.gguf"
        gguf.write(path, metadata, [(n, F32, a.shape, a) for n, a in arrays.items()])
        return path

    return write


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_gates_and_ups_may_lie_in_one_tensor(name, in_one):
    model = pyggml.load(in_one(name), compute="f32")
    assert "ffn_gate_up_exps" in model.parts.decoder.modules
    wanted = pyggml.load(GOLDEN / f"{name}.gguf", compute="f32").logits(TOKENS)
    assert nmse(model.logits(TOKENS), wanted) < 1e-12


@pytest.mark.interop
@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_llama_cpp_agrees_on_an_adapter_of_both(name, in_one, tmp_path):
    path = in_one(name)
    model = pyggml.load(path, compute="f32")
    before = model.logits(TOKENS)
    adapter = trained(model, modules=("ffn_gate_up_exps",))
    adapter.save(tmp_path / "adapter.gguf")
    ours = adapter.model.logits(TOKENS)
    assert nmse(ours, before) > 1e-2, "the adapter does next to nothing"
    assert nmse(llama_cpp_logits(path, TOKENS, tmp_path / "adapter.gguf"), ours) < 1e-6


FAULTS = [
    ({"expert_count": 0}, "qwen3moe.expert_count is 0, wanted 1 to 512"),
    ({"expert_count": 513}, "qwen3moe.expert_count is 513, wanted 1 to 512"),
    ({"expert_used_count": 5}, "5 of 4 experts cannot be used"),
    ({"expert_used_count": None}, "qwen3moe.expert_used_count is missing"),
    ({"expert_feed_forward_length": 1 << 30}, "expert_feed_forward_length is 1073741824, wanted"),
    ({"expert_count": 3}, r"ffn_up_exps.weight has shape \(4, 256, 16\), wanted \(3, 256, 16\)"),
]


@pytest.mark.parametrize("changes, message", FAULTS)
def test_mixtures_that_cannot_be_are_refused(tiny, changes, message):
    path = tiny("qwen3moe", keys={f"qwen3moe.{k}": v for k, v in changes.items()})
    with pytest.raises(ModelError, match=message):
        pyggml.load(path)


def test_layers_may_use_different_numbers_of_experts(tiny):
    """As a file says with an array; a router that uses all experts is a plain weighted sum."""
    counts = np.array([4, 1], np.int32)
    one = pyggml.load(tiny("qwen3moe", keys={"qwen3moe.expert_used_count": counts}))
    usual = pyggml.load(tiny("qwen3moe"))
    tokens = np.arange(8)
    assert [block.parts[1].body.parts[1].n_used for block in one.parts.decoder.blocks] == [4, 1]
    assert np.abs(one.logits(tokens) - usual.logits(tokens)).max() > 1e-3


def test_the_length_of_experts_may_lack(tiny):
    """Then the experts that are used share the layer's length, as in llama.cpp."""
    keys = {"qwen3moe.expert_feed_forward_length": None}
    shape = (4, 12, 16)
    tensors = {f"blk.{i}.ffn_{x}_exps.weight": shape for i in range(2) for x in ("gate", "up")}
    tensors |= {f"blk.{i}.ffn_down_exps.weight": (4, 16, 12) for i in range(2)}
    model = pyggml.load(tiny("qwen3moe", keys=keys, tensors=tensors))
    assert np.isfinite(model.logits(np.arange(8))).all()
