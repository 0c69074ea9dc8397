"""Whole models on the WebGPU device: gradients, runs, generation; nothing is left to the CPU."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import ranked_run
from full_training import FULL, check_losses, packed_losses, trainer_of
from tiny_models import spoil, write_llama

import pyggml
from pyggml.errors import DeviceLostError, PyggmlError
from pyggml.generation import Session
from pyggml.lora import Corpus, Dataset, LoraConfig, TrainConfig, Trainer, attach, loss_and_grads

from measures import nmse
from peers import PEERS
from peers.files import GOLDEN
from peers.peer import LORA_RANK, LORA_SCALE
from peers.trial import wide_modules

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
COMMITTED = Path(__file__).parents[1] / "golden" / "models"
# Whose recurrences have no kernel there.
RECURRENT = ("falcon-mamba", "mamba", "mamba2", "qwen35", "qwen35moe", "qwen3next")
some_is_left = pytest.mark.filterwarnings("ignore:webgpu leaves (gated_delta|ssm_scan)")


def gradients(path, backends):
    model = pyggml.load(path, compute="f32", backends=backends)
    adapter = attach(model, LoraConfig(rank=4, alpha=7.0))
    rng = np.random.default_rng(1)
    adapter.parameters.data[:] += 0.05 * rng.normal(size=adapter.parameters.data.size)
    return loss_and_grads(adapter.model, rng.integers(0, model.config.n_vocab, 33))


MAIN = ["llama-Q8_0", "qwen2-Q4_K_M", "qwen3-F16"]  # files that each clone has
OTHERS = sorted({p.stem for p in FIXTURES.glob("*-[FQ]*.gguf")} - set(MAIN))
MAIN_PEERS = ["gpt2"]  # each compiles its attention for most of a minute where Vulkan is software


def slow(names):
    """The recurrent ones may leave ops to the CPU; a warning fails a test otherwise."""
    return [
        pytest.param(
            name,
            marks=[
                pytest.mark.slow,
                *[some_is_left] * any(f"{name}-".startswith(f"{r}-") for r in RECURRENT),
            ],
        )
        for name in names
    ]


@pytest.fixture
def fixture(name):
    return (COMMITTED if name in MAIN else FIXTURES) / f"{name}.gguf"


def far(found, wanted):
    """The largest distance of an array from that of the same name, relative to its length."""
    assert found.keys() == wanted.keys()
    lengths = {name: max(np.linalg.norm(theirs), 1e-30) for name, theirs in wanted.items()}
    return max(np.linalg.norm(found[n] - wanted[n]) / length for n, length in lengths.items())


@pytest.mark.parametrize("name", [*MAIN, *slow(OTHERS)])
def test_gradients_of_an_adapter_are_the_host_s(name, fixture, gpu, record_property):
    loss, found = gradients(fixture, [gpu])
    of_host, wanted = gradients(fixture, [])
    assert loss == pytest.approx(of_host, rel=1e-6)
    record_property("far", float(far(found, wanted)))
    assert far(found, wanted) < 2e-5


@pytest.mark.parametrize("name", ["qwen2-Q4_K_M"])
def test_gradients_in_float16(name, fixture, gpu, record_property, monkeypatch):
    """Of weights alone, and of both factors where the device computes so."""
    exact_loss, exact = gradients(fixture, [gpu])
    monkeypatch.setattr(gpu.shaders, "in_f16", True)
    bounds, has_f16 = {False: (1e-5, 2.5e-3), True: (3e-3, 1e-2)}, gpu.shaders.has_f16
    for both in sorted({False, has_f16}):
        monkeypatch.setattr(gpu.shaders, "has_f16", both)
        loss, found = gradients(fixture, [gpu])
        assert loss == pytest.approx(exact_loss, rel=1e-4)
        record_property(f"far, both {both}", float(far(found, exact)))
        least, most = bounds[both]
        assert least < far(found, exact) < most


@pytest.mark.parametrize("name", [*MAIN, *slow(OTHERS)])
def test_generation_with_a_cache_of_float16(name, fixture, gpu, record_property):
    there, host = pyggml.load(fixture, backends=[gpu]), pyggml.load(fixture, compute="f32")
    tokens = np.random.default_rng(2).integers(0, host.config.n_vocab, 12)
    session, wanted = Session(there, 16), host.logits(tokens)
    for n in (7, 1, 3, 1):
        found = session.feed(tokens[session.n_past : session.n_past + n])
        error = nmse(found, wanted[session.n_past - 1])
        record_property("nmse", float(error))
        assert error < 1e-5


@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen3-F16"])
def test_golden_logits(name, fixture, gpu):
    """As tests/models/test_golden.py on the CPU, whose bounds are met."""
    architecture, kind = name.split("-")
    with np.load(COMMITTED / f"{architecture}-golden.npz") as arrays:
        wanted = arrays["f32_hf" if kind == "F16" else f"{kind}_exact"]
        tokens, rows = arrays["tokens"], arrays["rows"]
    found = pyggml.load(fixture, compute="f32", backends=[gpu]).logits(tokens)
    assert nmse(found[rows], wanted) < 5e-12


@pytest.mark.parametrize("name", [*MAIN_PEERS, *slow(sorted(set(PEERS) - set(MAIN_PEERS)))])
def test_golden_logits_and_gradients(name, gpu, record_property):
    """As tests/models/test_peers.py on the CPU, whose bounds are met."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        values = dict(arrays)
    model = pyggml.load(GOLDEN / f"{name}.gguf", compute="f32", backends=[gpu])
    error = nmse(model.logits(values["tokens"]), values["logits"])
    record_property("nmse", float(error))
    assert error < 1e-10
    modules = wide_modules(model, LORA_RANK)
    config = LoraConfig(rank=LORA_RANK, alpha=LORA_RANK * LORA_SCALE, modules=modules)
    adapter = attach(model, config)
    for pair in adapter.pairs.values():
        for t in (pair.a, pair.b):
            t.data[:] = values[f"lora/{t.name}"]
    loss, found = loss_and_grads(adapter.model, values["tokens"])
    assert loss == pytest.approx(float(values["lora_loss"]), rel=1e-6)
    wanted = {k.removeprefix("grad/"): v for k, v in values.items() if k.startswith("grad/")}
    record_property("far", float(far(found, wanted)))
    assert far(found, wanted) < 1e-4


@pytest.mark.parametrize("parts", ["whole", "in parts"])
def test_a_run_is_that_of_the_host_and_resumes_bit_for_bit(parts, gpu, narrow, tmp_path):
    device = gpu if parts == "whole" else narrow
    path = write_llama(tmp_path / "tiny.gguf", 600, n_layer=2, seed=3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 600, (8, 13)).astype(np.int32)
    corpus = Corpus(Dataset(tokens, np.zeros_like(tokens)), None)

    def trainer(backends, **settings):
        model = pyggml.load(path, compute="f32", backends=backends)
        adapter = attach(model, LoraConfig(rank=3, alpha=5.0, dropout=0.2))
        config = TrainConfig(
            lr=0.01, grad_accum=2, warmup_steps=1, clip=0.5, weight_decay=0.1, **settings
        )
        return Trainer(adapter.model, adapter.parameters, corpus, config)

    host, whole = trainer([]), trainer([device])
    host.run()
    whole.run()
    np.testing.assert_allclose(whole.history.losses, host.history.losses, rtol=1e-5)
    largest = np.abs(host.parameters.data).max()
    np.testing.assert_allclose(whole.parameters.data, host.parameters.data, atol=2e-4 * largest)
    first = trainer([device], checkpoint_dir=str(tmp_path / "points"))
    first.run(lambda event: first.stop())
    second = trainer([device])
    second.resume(next((tmp_path / "points").glob("step-*.gguf")))
    second.run()
    assert second.parameters.data.tobytes() == whole.parameters.data.tobytes()


@pytest.mark.parametrize(
    ("architecture", "optimiser"),
    [
        ("qwen3", "sgd"),
        ("qwen3", "adamw8bit"),
        *(pytest.param(a, "adamw", marks=pytest.mark.slow) for a in FULL),
    ],
)
def test_training_of_all_tensors_begins_with_pytorch_s_losses(architecture, optimiser, gpu):
    check_losses(architecture, optimiser, 4, [gpu], within=1e-5)


def test_halves_are_trained_there(gpu, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", 48, n_layer=1, seed=3)
    host, there = (
        trainer_of(path, "adamw", 3, backends, ctx=8, batch=1, in_halves=True)[1]
        for backends in ((), [gpu])
    )
    for trainer in (host, there):
        trainer.run(progress=False)
    np.testing.assert_allclose(there.history.losses, host.history.losses, rtol=0, atol=1e-4)


def test_what_blocks_will_hold_is_trained_there(gpu, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", 48, n_layer=1, seed=3)
    assert packed_losses(path, [gpu]) == pytest.approx(packed_losses(path), abs=1e-4)


@pytest.mark.parametrize("kind", ranked_run.OF_KIND)
def test_what_is_learned_of_a_teacher_and_of_rewards_is_the_host_s(kind, gpu, speaking):
    ranked_run.expect_as_on_the_host(speaking, kind, gpu)


def test_the_op_that_makes_no_number_is_named(gpu, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", 60, n_layer=2, seed=3, numbers=spoil)
    adapter = attach(pyggml.load(path, backends=[gpu]), LoraConfig(rank=2))
    tokens = np.random.default_rng(0).integers(0, 60, (6, 9)).astype(np.int32)
    corpus = Corpus(Dataset(tokens, np.zeros_like(tokens)), None)
    trainer = Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(max_steps=1))
    before = adapter.parameters.data.copy()
    with pytest.raises(PyggmlError, match="^step 1: the loss is nan, .*made by <.*norm.*>, of win"):
        trainer.run()
    np.testing.assert_array_equal(adapter.parameters.data, before)


def test_a_lost_device_ends_the_run_and_leaves_the_checkpoint(own_gpu, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", 60, n_layer=1, seed=3, tied=True)
    tokens = np.random.default_rng(0).integers(0, 60, (6, 9)).astype(np.int32)
    folder = tmp_path / "points"

    def trainer(backends):
        # By float32 on the host, too, whose attention else rounds in training.
        adapter = attach(
            pyggml.load(path, compute="f32", backends=backends), LoraConfig(rank=2, alpha=5.0)
        )
        config = TrainConfig(lr=0.01, checkpoint_dir=str(folder), checkpoint_every=1)
        corpus = Corpus(Dataset(tokens, np.zeros_like(tokens)), None)
        return Trainer(adapter.model, adapter.parameters, corpus, config)

    whole = trainer([])
    whole.run()
    shutil.rmtree(folder)
    lost = trainer([own_gpu])
    with pytest.raises(DeviceLostError, match="^webgpu has failed: Parent device is lost$"):
        lost.run(lambda event: event.step == 2 and own_gpu.device.destroy())
    resumed = trainer([])
    resumed.resume(max(folder.glob("step-*.gguf")))
    assert resumed.progress.step in (1, 2)
    resumed.run()
    np.testing.assert_allclose(resumed.history.losses, whole.history.losses, rtol=1e-4)
