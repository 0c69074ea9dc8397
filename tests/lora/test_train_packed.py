"""Training what blocks will hold: the file, the gradients, runs that go on, what is refused."""

import filecmp

import numpy as np
import pytest
from importances import random_importance
from separate_cpu import SeparateCPU
from tiny_models import scaled, write

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError, QuantError
from pyggml.graph.arrays import read
from pyggml.lora import TrainConfig, Trainer, loss_and_grads, train_packed, train_tensors
from pyggml.ops.loss.loss import cross_entropies
from pyggml.quants import quantize
from pyggml.requantize import FILE_TYPES, requantize

from measures import nmse
from peers.files import GOLDEN
from peers.trial import llama_cpp_logits
from runs import steps

TOKENS = np.arange(30) * 11 % 48


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of rows of 256, which K-quants pack."""
    sizes = {"embedding_length": 256, "feed_forward_length": 256, "block_count": 2}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return write(path, sizes=sizes, n_vocab=48, numbers=scaled)


def run_of(path, corpus, load=None, file_type="Q4_0", **settings):
    trained = train_packed(pyggml.load(path, **(load or {})), ["*"], file_type)
    config = TrainConfig(**{"lr": 0.01, "epochs": 2, "warmup_steps": 0, **settings})
    return trained, Trainer(trained.model, trained.parameters, corpus, config)


@pytest.mark.parametrize("file_type", ["Q4_0", "Q2_K", "Q4_K_M", "BF16"])
def test_untrained_it_is_the_packed_file_byte_for_byte(wide, tmp_path, file_type):
    requantize(wide, tmp_path / "plain.gguf", file_type)
    trained = train_packed(pyggml.load(wide), ["*"], file_type)
    assert trained.rate == (1e-4 if file_type == "Q2_K" else 2e-5)
    trained.save(tmp_path / "trained.gguf")
    assert filecmp.cmp(tmp_path / "plain.gguf", tmp_path / "trained.gguf", shallow=False)
    logits = pyggml.load(tmp_path / "plain.gguf").logits(TOKENS)
    np.testing.assert_array_equal(trained.model.logits(TOKENS), logits)


def test_gradients_are_those_of_the_numbers_in_the_blocks(tiny_tied, tmp_path):
    """As of a model of floats with these numbers: they go straight through the rounding."""
    trained = train_packed(pyggml.load(tiny_tied, compute="f32"), ["*"], "Q4_0")
    trained.save(tmp_path / "q.gguf")
    requantize(tmp_path / "q.gguf", tmp_path / "f.gguf", "F32")
    floats = train_tensors(pyggml.load(tmp_path / "f.gguf", compute="f32"), ["*"])
    loss, grads = loss_and_grads(trained.model, TOKENS, parameters=trained.parameters.operands)
    wanted_loss, wanted = loss_and_grads(floats.model, TOKENS, parameters=floats.parameters.tensors)
    assert loss == pytest.approx(wanted_loss, rel=1e-5) and grads.keys() == wanted.keys()
    for name, g in wanted.items():
        assert np.abs(grads[name] - g).max() < 1e-4 * np.abs(g).max(), name


@pytest.mark.parametrize(
    ("experts", "file_type", "n_types"), [(False, "Q4_0", 3), (True, "Q4_K_M", 4)]
)
def test_a_run_lowers_the_loss_and_its_file_has_the_bytes_that_it_read(
    tiny, corpus_of, tmp_path, experts, file_type, n_types
):
    path = GOLDEN / "qwen3moe.gguf" if experts else tiny
    before, events = path.read_bytes(), []
    trained, trainer = run_of(path, corpus_of(10), file_type=file_type, epochs=5)
    trainer.run(events.append)
    made = steps(events)
    assert np.mean([e.loss for e in made[-5:]]) < np.mean([e.loss for e in made[:5]]) - 0.1
    trained.save(tmp_path / "m.gguf")
    assert path.read_bytes() == before
    logits = pyggml.load(tmp_path / "m.gguf").logits(TOKENS)
    np.testing.assert_array_equal(logits, trained.model.logits(TOKENS))
    with gguf.open(tmp_path / "m.gguf") as file:
        assert file.require("general.file_type", int) == FILE_TYPES[file_type].number
        assert len({info.dtype for info in file.tensors.values()}) == n_types
        for name, t in trained.parameters.tensors.items():
            d, blocks = file.tensors[name].dtype, file.data(name).tobytes()
            assert blocks == read(trained.parameters.operands[name]).tobytes(), name
            assert blocks == quantize(np.array(t.data), d.name).tobytes(), name


def test_a_resumed_run_has_the_same_bits_with_any_threads(tiny, corpus_of, tmp_path):
    settings = {"keep_best": True, "val_every": 1, "epochs": 3, "lr": 0.03}
    whole, run = run_of(tiny, corpus_of(10), **settings)
    run.run()
    assert run.output_step < run.n_steps, "the parameters were exchanged at the end"
    w, packed = (p["output.weight"] for p in (whole.parameters.tensors, whole.parameters.operands))
    np.testing.assert_array_equal(packed.data, quantize(w.data, packed.dtype.name))
    folder = {"checkpoint_dir": str(tmp_path), "grad_checkpointing": True, "threads": 1}
    _, first = run_of(tiny, corpus_of(10), **settings, **folder)
    first.run(lambda event: first.progress.step == 5 and first.stop())
    again, second = run_of(tiny, corpus_of(10), **settings, **folder)
    second.resume(tmp_path)
    second.run()
    np.testing.assert_array_equal(again.parameters.data, whole.parameters.data)
    logits = again.model.logits(TOKENS)
    np.testing.assert_array_equal(logits, whole.model.logits(TOKENS))
    again.save(tmp_path / "m.gguf")
    np.testing.assert_array_equal(pyggml.load(tmp_path / "m.gguf").logits(TOKENS), logits)


def test_a_device_reads_what_was_packed_last(tiny, corpus_of):
    loads = ({"compute": "f32", "backends": b} for b in ((), [SeparateCPU()]))
    here, there = (run_of(tiny, corpus_of(10), load) for load in loads)
    for _, trainer in (here, there):
        trainer.run()
    np.testing.assert_array_equal(there[0].parameters.data, here[0].parameters.data)


def test_some_tensors_train_and_the_others_are_packed(tiny, tmp_path):
    trained = train_packed(pyggml.load(tiny), ["blk.1.ffn_*", "*norm"], "Q8_0")
    assert trained.words == ["10 tensors of the model, read as Q8_0 and 1 other type"]
    trained.save(tmp_path / "m.gguf")
    requantize(tiny, tmp_path / "plain.gguf", "Q8_0")
    assert filecmp.cmp(tmp_path / "m.gguf", tmp_path / "plain.gguf", shallow=False)
    logits = pyggml.load(tmp_path / "plain.gguf").logits(TOKENS)
    np.testing.assert_array_equal(trained.model.logits(TOKENS), logits)


def test_a_quantised_model_starts_from_its_original(tiny, tiny_tied, tmp_path):
    path = tmp_path / "q.gguf"
    requantize(tiny, path, "Q4_0")
    with gguf.open(tiny) as original:
        trained = train_packed(pyggml.load(path), ["*"], original=original)
        (name, t), *_ = trained.parameters.tensors.items()
        np.testing.assert_array_equal(t.data, original.data(name))
    trained.save(tmp_path / "again.gguf")
    assert filecmp.cmp(path, tmp_path / "again.gguf", shallow=False)
    with gguf.open(tiny_tied) as other, pytest.raises(AdapterError, match=r"output.weight is mis"):
        train_packed(pyggml.load(path), ["*"], original=other)


def test_what_cannot_be_packed_is_named(wide, tiny, tmp_path):
    alone = "IQ2_XXS is packed by an importance matrix alone, and training has none"
    with pytest.raises(QuantError, match=alone):
        train_packed(pyggml.load(wide), ["*norm"], "IQ2_XXS")
    requantize(wide, tmp_path / "q.gguf", "IQ2_XXS", importance=random_importance(wide))
    with pytest.raises(QuantError, match=alone):
        train_packed(pyggml.load(tmp_path / "q.gguf"), ["*"])
    trained = train_packed(pyggml.load(tiny), ["*"], "Q4_0")
    trained.parameters.tensors["output.weight"].data[1, 2] = np.nan
    with pytest.raises(QuantError, match=r"output.weight: .*nan at \(1, 2\); lr may be too high"):
        trained.parameters.pack(trained.model.devices)


@pytest.mark.interop
@pytest.mark.parametrize("file_type", ["Q4_0", "Q2_K", "Q3_K_M"])
def test_llama_cpp_gives_our_logits_and_perplexity(shared, tmp_path, file_type):
    model = pyggml.load(shared / "fixtures/llama-Q4_K_M.gguf", compute="f32")
    trained = train_packed(model, ["*"], file_type)
    trained.parameters.data[:] *= np.float32(1.1)
    trained.parameters.pack(model.devices)
    trained.save(tmp_path / "m.gguf")
    tokens = np.arange(40) % model.config.n_vocab
    ours, theirs = trained.model.logits(tokens), llama_cpp_logits(tmp_path / "m.gguf", tokens)
    assert nmse(theirs, ours) < 2.5e-3
    first, second = (-cross_entropies(x[:-1], tokens[1:]).mean() for x in (ours, theirs))
    # llama.cpp rounds activations to int8: the plain file of Q2_K differs by 5e-3 as well.
    assert abs(first - second) < 8e-3
