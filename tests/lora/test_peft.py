"""Kinds of adapters against PEFT's own numbers (tests/golden/adapters/make.py)."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.graph.dtypes import F16, F32
from pyggml.lora import LoraConfig, TrainConfig, attach, loss_and_grads
from pyggml.lora.optim import FlatAdamW

GOLDEN = Path(__file__).parents[1] / "golden/adapters/peft.npz"
KEYS = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
USUAL = {"rank": 3, "alpha": 7.0}
PATTERNS = {
    "rank_pattern": {"ffn_up": 5, "blk.1.attn_q": 2},
    "alpha_pattern": {"ffn_down": 4.5},
}
KINDS = {
    "rslora": {"rslora": True, **PATTERNS},
    "patterns": PATTERNS,
    "dora": {"dora": True, "rslora": True},
    "pissa": {"init": "pissa"},
}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def base(golden, tmp_path_factory):
    """The model as a file."""
    path = tmp_path_factory.mktemp("peft") / "base.gguf"
    keys = {"general.architecture": "qwen3"} | {f"qwen3.{k}": v for k, v in KEYS.items()}
    weights = part(golden, "weights")
    tensors = [
        (n, F16, a.shape, a) if a.ndim > 1 else (n, F32, a.shape, a.astype(np.float32))
        for n, a in weights.items()
    ]
    gguf.write(path, keys, tensors)
    return path


def part(golden, name):
    """What stands below a name."""
    return {k.removeprefix(f"{name}/"): a for k, a in golden.items() if k.startswith(f"{name}/")}


def as_in_peft(golden, base, kind):
    """An adapter with PEFT's numbers."""
    adapter = attach(pyggml.load(base, compute="f32"), LoraConfig(**USUAL, **KINDS[kind]))
    theirs = part(golden, kind)
    for name, t in adapter.parameters.tensors.items():
        t.data[:] = theirs[name]
    for name, t in adapter.parameters.constants.items():
        start = golden[f"{kind}/start/{name}"]
        t.data[:] = start if name.endswith("a") else -start
    return adapter


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_peft_s(golden, base, kind):
    adapter = as_in_peft(golden, base, kind)
    theirs = part(golden, kind)
    wanted = theirs["logits"]
    found = adapter.model.logits(golden["tokens"])
    assert np.linalg.norm(found - wanted) < 4e-6 * np.linalg.norm(wanted)
    parameters = adapter.parameters.tensors
    loss, grads = loss_and_grads(adapter.model, golden["tokens"], parameters=parameters)
    assert loss == pytest.approx(float(theirs["loss"]), rel=2e-6)
    assert {f"grad/{name}" for name in grads} == {n for n in theirs if n.startswith("grad/")}
    for name, g in grads.items():
        want = theirs[f"grad/{name}"]
        assert np.linalg.norm(g - want) < 2e-5 * np.linalg.norm(want), name


def test_pissa_starts_as_in_peft(golden, base):
    """But for the sign, which a singular vector may have either way."""
    adapter = attach(pyggml.load(base), LoraConfig(**USUAL, init="pissa"))
    for name, pair in adapter.pairs.items():
        a, b = (golden[f"pissa/start/{name}.lora_{half}"] for half in "ab")
        sign = np.sign((pair.a.data * a).sum(axis=1))
        np.testing.assert_allclose(pair.a.data, a * sign[:, None], atol=2e-5)
        np.testing.assert_allclose(pair.b.data, b * sign, atol=2e-5)
        np.testing.assert_array_equal(adapter.fixed[name].b.data, -pair.b.data)


def test_lora_plus_steps_are_peft_s(golden, base):
    config = LoraConfig(**USUAL, **KINDS["rslora"], plus_ratio=8.0)
    adapter = attach(pyggml.load(base, compute="f32"), config)
    p = adapter.parameters
    for name, t in p.tensors.items():
        t.data[:] = golden[f"rslora/{name}"]
    optimiser = FlatAdamW(p, TrainConfig(weight_decay=0.1, clip=0.0))
    losses = []
    for n in range(1, 6):
        loss, grads = loss_and_grads(adapter.model, golden["tokens"])
        for name, g in grads.items():
            p.gradients[name].data[:] = g
        optimiser.step(2e-3, n)
        losses.append(loss)
    np.testing.assert_allclose(losses, golden["plus/losses"], rtol=1e-5)
    for name, pair in adapter.pairs.items():
        np.testing.assert_allclose(pair.b.data, golden[f"plus/{name}.lora_b"], atol=2e-5)
