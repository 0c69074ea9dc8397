"""The engine in one file, examples/mini.py, computes what the fast engine computes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.cli.demo import BASE, TEXT
from pyggml.generation import generate
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach, loss_and_grads
from pyggml.lora.data import Corpus, Dataset

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/golden/models"
SOURCE = ROOT / "examples/mini.py"
FILES = {
    "demo Q8_0": BASE,
    "llama Q8_0": GOLDEN / "llama-Q8_0.gguf",
    "qwen3 F16": GOLDEN / "qwen3-F16.gguf",
    "qwen2 Q4_K_M": GOLDEN / "qwen2-Q4_K_M.gguf",
}
IDS = np.random.default_rng(5).integers(3, 500, 41)


@pytest.fixture(scope="module")
def mini():
    spec = importlib.util.spec_from_file_location("mini", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=FILES)
def both(mini, request):
    """(mini's model, its parameters by name, the fast engine's adapter), B's numbers random too."""
    path = FILES[request.param]
    adapter = attach(pyggml.load(path, compute="f32"), LoraConfig(rank=4, alpha=12))
    model, rng = mini.Model(mini.Gguf(path)), np.random.default_rng(1)
    model.attach(rank=4, alpha=12)
    parameters = {}
    for name, pair in model.pairs.items():
        for mine, t, letter in zip(
            pair, (adapter.pairs[name].a, adapter.pairs[name].b), "ab", strict=True
        ):
            mine.data = rng.normal(0, 0.05, t.shape).astype(np.float32)
            t.data[:] = mine.data
            parameters[f"{name}.lora_{letter}"] = mine
    assert len(parameters) == len(adapter.parameters.tensors)
    return model, parameters, adapter


def test_it_stands_alone():
    text = SOURCE.read_text("utf-8")
    assert len(text.splitlines()) <= 300
    assert "import pyggml" not in text and "from pyggml" not in text


def test_its_logits_are_the_engine_s(both):
    model, _, adapter = both
    fast = adapter.model.logits(IDS)
    np.testing.assert_allclose(model.logits(IDS).data, fast, atol=2e-5 * np.abs(fast).max())


def test_its_gradients_are_the_engine_s(both):
    model, parameters, adapter = both
    loss = model.logits(IDS[:-1]).cross_entropy(IDS[1:])
    loss.backward()
    fast_loss, fast = loss_and_grads(adapter.model, IDS)
    assert float(loss.data) == pytest.approx(fast_loss, rel=1e-5)
    for name, t in parameters.items():
        np.testing.assert_allclose(t.grad, fast[name], atol=5e-5 * np.abs(fast[name]).max())
        t.grad = None


def test_steps_lose_what_the_engine_s_lose(both, mini):
    model, parameters, adapter = both
    mine = [*mini.train(model, [*parameters.values()], IDS, 5, ctx=40, lr=0.01)]
    window = Dataset(IDS[None].astype(np.int32), np.zeros((1, 41), np.int32))
    config = TrainConfig(lr=0.01, epochs=5, warmup_steps=0, lr_scheduler="constant", batch=1)
    trainer = Trainer(adapter.model, adapter.parameters, Corpus(window, None), config)
    trainer.run()
    np.testing.assert_allclose(mine, trainer.history.losses, rtol=1e-4)
    assert mine[-1] < mine[0] - 0.2


def test_its_text_is_the_engine_s(mini):
    """The vocabulary, and the likeliest tokens."""
    fast, file = pyggml.load(BASE, compute="f32"), mini.Gguf(BASE)
    words, text = mini.tokenizer(file), TEXT.read_text("utf-8")[:5000]
    ids = fast.tokenizer.encode(text)
    assert words.encode(text).ids == list(ids)
    written = mini.Model(file).write(np.array(ids[:20]), 12)
    assert written[20:].tolist() == [*generate(fast, ids[:20], 12)]


@pytest.mark.parametrize("type_", ["F32", "F16", "Q8_0", "Q4_K", "Q6_K"])
def test_its_types_are_the_engine_s(mini, type_, rng):
    from pyggml.graph.dtypes import dtype
    from pyggml.quants import dequantize

    kind = dtype(type_)
    data = rng.integers(0, 256, 64 * kind.block_bytes, np.uint8)
    number = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}[type_]
    weight = mini.Weight((64, kind.block), number, data)
    fast = dequantize(data.reshape(64, -1), type_).reshape(weight.shape)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(weight.numbers(), fast, rtol=1e-6, equal_nan=True)
