"""Training the scales of blocks: gradients, the file, runs that go on, what is refused."""

import weakref

import numpy as np
import pytest
from separate_cpu import SeparateCPU
from tiny_models import write as write_model

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError
from pyggml.graph.arrays import read, write
from pyggml.graph.dtypes import dtype
from pyggml.graph.tensor import leaf
from pyggml.lora import TrainConfig, Trainer, loss_and_grads, train_scales, train_tensors
from pyggml.ops.loss.loss import cross_entropies
from pyggml.quants import dequantize, quantize
from pyggml.quants.scales import scale_places
from pyggml.requantize import requantize

from measures import nmse
from peers.trial import llama_cpp_logits
from runs import steps

TOKENS = np.arange(30) * 11 % 48


@pytest.fixture(scope="module")
def packed(tiny, tmp_path_factory):
    """The tiny model with matrices of d and m, and an output matrix that keeps its scales."""
    path = tmp_path_factory.mktemp("packed") / "tiny-Q5_1.gguf"
    requantize(tiny, path, "Q5_1")
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """One of experts, whose output matrix is its token embedding."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"embedding_length": 32, "expert_feed_forward_length": 64, "block_count": 1}
    path = write_model(
        folder / "f.gguf", "qwen3moe", sizes, tensors={"output.weight": None}, n_vocab=48
    )
    requantize(path, folder / "packed.gguf", "Q4_1")
    return folder / "packed.gguf"


def run_of(path, corpus, **settings):
    trained = train_scales(pyggml.load(path))
    config = TrainConfig(**{"lr": 0.02, "epochs": 2, "warmup_steps": 0, **settings})
    return trained, Trainer(trained.model, trained.parameters, corpus, config)


@pytest.mark.parametrize("model", ["packed", "mixture"])
def test_gradients_are_slopes_of_the_loss(model, request):
    """Of all scales of a matrix along themselves, whatever float16 holds of the way: those of
    blocks, of the output matrix, of embeddings that are both, and of experts."""
    trained = train_scales(pyggml.load(request.getfixturevalue(model), compute="f32"))
    tensors, h = trained.parameters.tensors, 2**-4
    assert len(tensors) == {"packed": 23, "mixture": 8}[model]
    _, grads = loss_and_grads(trained.model, TOKENS, parameters=tensors)
    for name, u in tensors.items():
        ends = []
        for side in (1, -1):
            write(u, np.full(u.shape, side * h, np.float32))
            ends.append(loss_and_grads(trained.model, TOKENS, parameters={name: u})[0])
        write(u, np.zeros(u.shape, np.float32))
        slope, found = (ends[0] - ends[1]) / (2 * h), float(grads[name].sum())
        assert abs(found - slope) < 0.02 * np.abs(grads[name]).sum() + 1e-5, name


def test_the_gradient_is_that_of_the_weights_themselves(packed, tmp_path):
    """Σ dW·(its part of W), with the dW of the same model in floats."""
    requantize(packed, tmp_path / "f.gguf", "F32")
    floats = train_tensors(pyggml.load(tmp_path / "f.gguf", compute="f32"), ["blk.*.ffn_up.weight"])
    _, dw = loss_and_grads(floats.model, TOKENS, parameters=floats.parameters.tensors)
    trained = train_scales(pyggml.load(packed, compute="f32"))
    _, grads = loss_and_grads(trained.model, TOKENS, parameters=trained.parameters.tensors)
    with gguf.open(packed) as file:
        for name, slopes in dw.items():
            step = trained.model.parts.weights[name].src[1].params["s"]
            w = dequantize(file.data(name), "Q5_1")
            both = (w * slopes).reshape(*w.shape[:-1], -1, 32).sum(-1)  # of d and of m together
            found = grads[f"{name}.scales"].sum(-1) / step
            assert np.abs(found - both).max() < 1e-4 * np.abs(both).max()


def test_a_run_lowers_the_loss_and_its_file_is_the_model(packed, corpus_of, tmp_path):
    before, events = packed.read_bytes(), []
    trained, trainer = run_of(packed, corpus_of(10), epochs=5)
    with gguf.open(packed) as file:  # which each matrix stands in once
        assert trainer.reserve().weights == sum(info.n_bytes for info in file.tensors.values())
    trainer.run(events.append)
    made = steps(events)
    assert np.mean([e.loss for e in made[-5:]]) < np.mean([e.loss for e in made[:5]])
    trained.save(tmp_path / "m.gguf")
    assert packed.read_bytes() == before
    again = pyggml.load(tmp_path / "m.gguf")
    np.testing.assert_array_equal(again.logits(TOKENS), trained.model.logits(TOKENS))
    with gguf.open(packed) as old, gguf.open(tmp_path / "m.gguf") as new:
        for name, info in old.tensors.items():
            assert (new.tensors[name].dtype, new.tensors[name].shape) == (info.dtype, info.shape)
            differ = old.data(name).reshape(-1) != new.data(name).reshape(-1)
            kind = info.dtype
            places = scale_places(kind.name)[..., 0] if kind.quantised else []
            is_scale = np.isin(np.arange(differ.size) % kind.block_bytes, places)
            assert not (differ & ~is_scale).any(), name
            assert (differ & is_scale).any() == kind.quantised, name


def test_a_resumed_run_has_the_same_bytes(packed, corpus_of, tmp_path):
    whole, run = run_of(packed, corpus_of(10))
    run.run()
    folder = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2, "grad_checkpointing": True}
    _, first = run_of(packed, corpus_of(10), **folder)
    first.run(lambda event: first.progress.step == 5 and first.stop())
    again, second = run_of(packed, corpus_of(10), **folder)
    second.resume(tmp_path)
    second.run()
    np.testing.assert_array_equal(again.parameters.data, whole.parameters.data)


def test_what_a_model_reads_of_its_scales_holds_no_freed_memory(packed, corpus_of):
    """The blocks that are made anew for each pass lie in the arena of the run's graphs."""
    trained, trainer = run_of(packed, corpus_of(10), max_steps=1)
    trainer.run(progress=False)
    arena = weakref.ref(trained.model.parts.weights["output.weight"].data.base)
    trainer.free()
    assert arena() is None
    assert np.isfinite(trained.model.logits(TOKENS)).all()


def test_what_has_no_scales_is_told(tiny, packed, tmp_path):
    assert train_scales(pyggml.load(packed)).words == ["the scales of 23 matrices"]
    with pytest.raises(AdapterError, match="its tensors are F32; quantise the model first"):
        train_scales(pyggml.load(tiny))
    model = pyggml.load(packed)
    name = "blk.0.ffn_up.weight"
    raw = quantize(dequantize(read(model.parts.weights[name]), "Q5_1"), "MXFP4")
    model.parts.weights[name] = leaf(raw, name, dtype("MXFP4"))
    assert train_scales(model).words == ["the scales of 22 matrices", "blk.0.ffn_up keeps theirs"]


def test_a_device_trains_the_bits_of_the_host(packed, tmp_path):
    losses = []
    for i, backends in enumerate(([], [SeparateCPU()])):
        trained = train_scales(pyggml.load(packed, compute="f32", backends=backends))
        losses.append(loss_and_grads(trained.model, TOKENS, parameters=trained.parameters.tensors))
        for name, u in trained.parameters.tensors.items():
            write(u, -0.1 * np.sign(losses[0][1][name]))
        trained.save(tmp_path / f"{i}.gguf")
    assert losses[0][0] == losses[1][0]
    for name, gradient in losses[0][1].items():
        np.testing.assert_array_equal(losses[1][1][name], gradient)
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()


@pytest.mark.interop
def test_llama_cpp_gives_our_logits_and_perplexity(shared, tmp_path):
    """Of a K-quant mix, whose scales are far from where they were."""
    model = pyggml.load(shared / "fixtures/llama-Q4_K_M.gguf", compute="f32")
    trained = train_scales(model)
    for t in trained.parameters.tensors.values():
        write(t, np.random.default_rng(t.n_elements).normal(0, 0.2, t.shape))
    trained.save(tmp_path / "m.gguf")
    tokens = np.arange(40) % model.config.n_vocab
    ours = trained.model.logits(tokens)
    assert nmse(ours, model.logits(tokens)) > 1e-3, "the scales do next to nothing"
    theirs = llama_cpp_logits(tmp_path / "m.gguf", tokens)
    assert nmse(theirs, ours) < 1e-3
    first, second = (-cross_entropies(x[:-1], tokens[1:]).mean() for x in (ours, theirs))
    assert abs(first - second) < 2e-3
