"""Training of all tensors: PyTorch's losses, the same bits however it is run, and llama.cpp."""

from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from full_training import FULL, OPTIMISERS, check_losses, golden
from full_training import trainer_of as run_of
from separate_cpu import SeparateCPU
from tiny_models import NO_VOCABULARY, write_llama

import pyggml
from pyggml.errors import AdapterError, QuantError
from pyggml.fresh import Fresh, hyperparameters, vocabulary_fields
from pyggml.fresh import write as write_fresh
from pyggml.graph.arrays import read, write
from pyggml.lora import train_tensors
from pyggml.lora.optim import adamw_8bit
from pyggml.lora.trainer import gradient
from pyggml.models.weights import FRESH
from pyggml.ops import optim_half
from pyggml.quants import quantize

from peers.files import GOLDEN
from peers.trial import llama_cpp_logits
from runs import state

BASE = Path(__file__).parents[1] / "golden/models/qwen3-F16.gguf"
MIXTURE = GOLDEN / "qwen3moe.gguf"
RUNS = [*product(FULL, OPTIMISERS)]
# A second and a half each; a clone has qwen3's file.
IN_EVERY_CHECK = [*product(FULL[:4], ["adamw"]), *product(FULL[:2], ["sgd"])]


@pytest.mark.parametrize(
    ("architecture", "optimiser"),
    [pytest.param(*r, marks=[pytest.mark.slow] * (r not in IN_EVERY_CHECK)) for r in RUNS],
)
def test_losses_are_pytorch_s_over_100_steps(architecture, optimiser):
    wanted = golden()[f"{architecture}/{optimiser}"]
    assert wanted[-1] < 0.2 * wanted[0]
    check_losses(architecture, optimiser)


@pytest.mark.parametrize(
    "architecture",
    ["qwen3", *(pytest.param(a, marks=pytest.mark.slow) for a in ("phi3", "llama", "qwen2"))],
)
def test_losses_of_moments_in_8_bits_are_bitsandbytes_own(architecture):
    check_losses(architecture, "adamw8bit")


@pytest.mark.parametrize(
    "optimiser, more",
    [
        ("adamw", {}),
        ("adamw8bit", {}),
        ("sgd", {}),
        ("adamw8bit", {"step_in_backward": True, "in_halves": True}),
        ("sgd", {"in_halves": True, "grad_accum": 2}),
        ("muon", {"in_halves": True}),
        ("adamw8bit", {"step_in_backward": True}),
        ("muon", {}),
        ("adamw", {"compute": "bf16"}),
        ("adamw", {"compute": "bf16", "step_in_backward": True}),
    ],
)
def test_a_resumed_run_and_any_number_of_threads_make_the_same_bits(
    tiny, tmp_path, optimiser, more, monkeypatch
):
    monkeypatch.setattr(adamw_8bit, "LEAST", 64)
    trainer_of = partial(run_of, **more)
    _, whole = trainer_of(tiny, optimiser, 6, threads=2)
    whole.run(progress=False)
    checkpoints = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 3}
    _, first = trainer_of(tiny, optimiser, 6, threads=1, **checkpoints)
    first.run(lambda event: first.stop() if first.progress.step == 3 else None, progress=False)
    _, second = trainer_of(tiny, optimiser, 6, threads=1)
    second.resume(tmp_path)
    assert second.progress.step == 3
    second.run(progress=False)
    assert state(second) == state(whole)


@pytest.mark.parametrize(
    "path, settings",
    [
        (None, {"grad_accum": 3}),
        (None, {"compute": "bf16", "grad_checkpointing": True}),
        (BASE, {"grad_accum": 2, "compute": "bf16"}),  # its embedding is its output matrix
        (MIXTURE, {"ctx": 1, "batch": 1, "grad_accum": 2}),  # two of six experts
    ],
)
def test_a_pass_that_writes_over_the_gradient_gives_the_bits_of_one_that_adds_to_zeros(
    tiny, path, settings, monkeypatch
):
    def zeros(parameters, devices, parts):
        return lambda: parameters.gradient.fill(0)

    _, over = run_of(path or tiny, "adamw", 3, **settings)
    over.run(progress=False)
    monkeypatch.setattr(gradient, "_zero", zeros)
    _, onto = run_of(path or tiny, "adamw", 3, **settings)
    onto.run(progress=False)
    assert state(over) == state(onto) and over.history.losses == onto.history.losses
    assert np.array_equal(over.parameters.gradient, onto.parameters.gradient)


def test_a_further_pass_over_a_batch_adds_to_its_gradient(tiny):
    _, trainer = run_of(tiny, "adamw", 3)
    size = trainer.config.batch
    first, second = trainer.corpus.train.batches(np.arange(2 * size), size)
    gradients = []
    for batches in ([first], [second], [first, second]):
        trainer.gradient.begin()
        for batch in batches:
            trainer.passes.train(batch)
        gradients.append(trainer.parameters.gradient.copy())
    assert all(g.any() for g in gradients)
    np.testing.assert_allclose(gradients[0] + gradients[1], gradients[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimiser", ["adamw8bit", "muon"])
def test_a_device_keeps_moments_of_single_tensors(tiny, tmp_path, optimiser, monkeypatch):
    """And a run that was stopped there goes on without it."""
    monkeypatch.setattr(adamw_8bit, "LEAST", 64)
    _, whole = run_of(tiny, optimiser, 4)
    whole.run(progress=False)
    checkpoints = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    _, first = run_of(tiny, optimiser, 4, backends=[SeparateCPU()], **checkpoints)
    first.run(lambda event: first.stop() if first.progress.step == 2 else None, progress=False)
    _, second = run_of(tiny, optimiser, 4)
    second.resume(tmp_path)
    second.run(progress=False)
    assert state(second) == state(whole)


def test_a_device_keeps_halves(tiny):
    """Its loss is not fused, so that gradients differ in their last bits."""
    (_, host), (_, apart) = (
        run_of(tiny, "adamw", 3, in_halves=True, backends=backends)
        for backends in ((), [SeparateCPU()])
    )
    for trainer in (host, apart):
        trainer.run(progress=False)
    np.testing.assert_allclose(apart.history.losses, host.history.losses, rtol=0, atol=1e-5)
    arrays = apart.parameters.arrays
    alike = [np.mean(arrays[n] == a) for n, a in host.parameters.arrays.items() if a.ndim == 2]
    assert len(alike) > 5
    assert min(alike) > 0.98  # where they are taken from the device, and with the same dice


def test_steps_rounded_by_chance_learn_where_the_nearest_halves_stall(tiny, monkeypatch):
    """The mean loss of the last steps at a rate where most steps are less than half a unit."""

    def nearest(out, x, *_):
        out[:] = quantize(x, "BF16").view(np.uint16)

    def end(in_halves):
        _, trainer = run_of(tiny, "sgd", lr=0.05, weight_decay=0.0, in_halves=in_halves)
        trainer.run(progress=False)
        return np.mean(trainer.history.losses[-10:])

    in_floats, by_chance = end(False), end(True)
    monkeypatch.setattr(optim_half, "round_by_draw", nearest)
    assert abs(by_chance - in_floats) < 0.02 < 0.1 < end(True) - in_floats


def test_products_in_bfloat16_learn_what_exact_ones_do(tiny):
    """What is trained stays float32: the file has numbers that the products round away."""
    losses = {}
    for compute in ("f32", "bf16"):
        trained, trainer = run_of(tiny, "adamw", 30, compute=compute)
        trainer.run(progress=False)
        losses[compute] = np.array(trainer.history.losses)
    assert trained.words[-1] == "22 matrices multiplied in bfloat16 (--compute f32: exactly)"
    assert 0 < np.abs(losses["f32"] - losses["bf16"]).max() < 0.02
    assert (trained.parameters.data.view(np.uint32) & 0xFFFF).any()


def test_constants_stay_and_are_named(shared):
    model = pyggml.load(shared / "fixtures/llama-F16.gguf")
    trained = train_tensors(model, ["*"])
    assert len(trained.parameters.tensors) == len(model.parts.weights) - 1
    assert trained.words[1] == "rope_freqs.weight stays: the loss has no slope there"
    with pytest.raises(AdapterError, match=r"rope_freqs.weight: the loss has no slope"):
        train_tensors(model, ["rope_freqs"])


def test_numbers_that_f16_does_not_hold_are_named_and_no_file_is_touched(tmp_path):
    """The base is none that is written; the older output stays whole."""
    base = BASE.read_bytes()
    trained = train_tensors(pyggml.load(BASE), ["blk.0.ffn_*"])
    out = tmp_path / "out.gguf"
    trained.save(out)
    older = out.read_bytes()
    up = trained.parameters.tensors["blk.0.ffn_up.weight"]
    write(up, np.full(up.shape, 1e5, np.float32))
    with pytest.raises(QuantError, match=r"blk\.0\.ffn_up\.weight.*F16"):
        trained.save(out)
    assert out.read_bytes() == older and BASE.read_bytes() == base
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_a_model_is_fresh_as_long_as_matrices_are_zero_that_began_so(tmp_path):
    """Such zeros are no broken download, whatever was trained; a warning is an error here."""
    fields = vocabulary_fields(["in köln lebt ein kater "] * 20, 270)
    n_vocab = len(fields["tokenizer.ggml.tokens"])
    metadata = hyperparameters("rwkv7", 200_000, n_vocab, 64)
    write_fresh(tmp_path / "new.gguf", Fresh(metadata, n_vocab, fields), seed=1)
    for patterns, number, is_fresh in ((["norms"], 0, True), (["*"], 0, True), (["*"], 1, False)):
        trained = train_tensors(pyggml.load(tmp_path / "new.gguf"), patterns)
        for t in trained.parameters.tensors.values():
            write(t, read(t) + number)
        trained.save(tmp_path / "after.gguf")
        assert (FRESH in pyggml.load(tmp_path / "after.gguf").file.metadata) == is_fresh


@pytest.mark.interop
def test_llama_cpp_has_our_perplexity_of_the_file(tmp_path):
    told = NO_VOCABULARY | {"llama.vocab_size": 64}
    base = write_llama(tmp_path / "base.gguf", n_vocab=64, n_layer=2, seed=1, keys=told)
    trained, trainer = run_of(base, "adamw", 20, lr=5e-3)
    trainer.run(progress=False)
    trained.save(tmp_path / "full.gguf")
    tokens = golden()["ids"][150].astype(np.int32)
    ours, before = (
        perplexity(pyggml.load(path, compute="f32").logits(tokens), tokens)
        for path in (tmp_path / "full.gguf", base)
    )
    theirs = perplexity(llama_cpp_logits(tmp_path / "full.gguf", tokens), tokens)
    assert ours < 0.5 * before
    assert theirs == pytest.approx(ours, rel=1e-4)


def perplexity(logits, tokens):
    """Of all tokens but the first."""
    x = logits[:-1].astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return float(np.exp(-log_p[np.arange(len(x)), tokens[1:]].mean()))
