"""A model's loss, gradients and text on the card, and steps of a run: they equal the host's."""

from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import ranked_run
from full_training import (
    FULL,
    OPTIMISERS,
    check_losses,
    model_of,
    packed_losses,
    trainer_of,
)
from tiny_models import spoil, write_llama

import pyggml
from pyggml.backends.cuda.runtime.device import CudaBackend
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.errors import PyggmlError
from pyggml.generation import Session
from pyggml.generation.ahead import runs_ahead
from pyggml.lora import Corpus, Dataset, LoraConfig, TrainConfig, Trainer, attach, loss_and_grads

from runs import state

GOLDEN = Path(__file__).parents[2] / "golden/models"
TOKENS = np.arange(17) * 7 % 48
# What the simulator takes minutes for; the ops' own samples are computed in test_kernels.py.
COSTLY = ("attention", "experts", "head", "losses", "products")
on_a_card = pytest.mark.skipif(SIMULATED, reason="the simulator takes minutes for a product")


def adapted(path, *backends):
    adapter = attach(pyggml.load(path, compute="f32", backends=backends), LoraConfig(rank=4))
    rng = np.random.default_rng(3)
    adapter.parameters.data[:] = rng.normal(0, 0.1, adapter.parameters.data.size)
    return adapter.model


def same(path, card):
    """Loss and gradients of the host and of the card, twice: the second run is captured."""
    wanted_loss, wanted = loss_and_grads(adapted(path), TOKENS)
    model = adapted(path, card)
    for _ in range(2):
        loss, gradients = loss_and_grads(model, TOKENS)
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        for name, g in gradients.items():
            assert np.linalg.norm(g - wanted[name]) <= 1e-5 * np.linalg.norm(wanted[name]), name


class Cheap(CudaBackend):
    """Leaves what is costly to the host, so that numbers go to and fro."""

    def refusal(self, node):
        family = self._kernels.get(node.op.name)
        bind = family and getattr(family.bind, "func", family.bind)  # of a partial
        costly = family and bind.__module__.split(".")[3] in COSTLY
        return "it is costly" if costly else super().refusal(node)


@pytest.mark.filterwarnings("ignore:.* leaves .* to cpu")
def test_a_step_shared_with_the_host(tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", 48, n_layer=2, seed=1)
    same(path, Cheap(0, "f32"))


@pytest.mark.filterwarnings("ignore:.* leaves .* to cpu")
@pytest.mark.filterwarnings("ignore:.*invalid value encountered")  # the simulator's NumPy, of NaN
def test_the_op_that_makes_no_number_is_named(tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", 48, n_layer=2, seed=1, numbers=spoil)
    model = pyggml.load(path, compute="f32", backends=[Cheap(0, "f32")])
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    corpus = Corpus(Dataset(tokens, np.zeros_like(tokens)), None)
    adapter = attach(model, LoraConfig(rank=2))
    trainer = Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(max_steps=1))
    with pytest.raises(PyggmlError, match="^step 1: the loss is nan, .*made by <.*norm.*>, of win"):
        trainer.run()


@pytest.mark.filterwarnings("ignore:.* leaves .* to cpu")
@pytest.mark.parametrize("in_halves", [False, True])
def test_a_step_of_all_tensors_shared_with_the_host(tmp_path, in_halves):
    path = write_llama(tmp_path / "tiny.gguf", 48, n_layer=1, seed=1)
    host, shared = (
        trainer_of(path, "sgd", 1, backends, ctx=8, batch=1, in_halves=in_halves)[1]
        for backends in ((), [Cheap(0, "f32")])
    )
    for trainer in (host, shared):
        trainer.run(progress=False)
    np.testing.assert_allclose(shared.history.losses, host.history.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(shared.parameters.data, host.parameters.data, rtol=0, atol=1e-5)


@on_a_card
@pytest.mark.parametrize(
    ("architecture", "optimiser"), [*product(FULL, OPTIMISERS), ("qwen3", "adamw8bit")]
)
def test_training_of_all_tensors_begins_with_pytorch_s_losses(card, architecture, optimiser):
    check_losses(architecture, optimiser, 20, [card])


@on_a_card
@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("optimiser", [*OPTIMISERS, "adamw8bit", "muon"])
def test_a_resumed_run_of_all_tensors_makes_the_same_bits(card, tmp_path, optimiser, in_halves):
    path, checkpoints = model_of("qwen3"), {"checkpoint_dir": str(tmp_path), "checkpoint_every": 3}
    whole, first, second = (
        trainer_of(path, optimiser, 6, [card], in_halves=in_halves, **more)[1]
        for more in ({}, checkpoints, {})
    )
    whole.run(progress=False)
    first.run(lambda event: first.stop() if first.progress.step == 3 else None, progress=False)
    second.resume(tmp_path)
    assert second.progress.step == 3
    second.run(progress=False)
    assert state(second) == state(whole)


@on_a_card
def test_what_blocks_will_hold_is_trained_there(card, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", 48, n_layer=1, seed=3)
    assert packed_losses(path, [card]) == pytest.approx(packed_losses(path), abs=1e-4)


@on_a_card
@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen2-Q4_K_M", "qwen3-F16", "lfm2-Q4_K_M"])
def test_a_whole_step(card, name):
    same(GOLDEN / f"{name}.gguf", card)


@on_a_card
@pytest.mark.parametrize("kind", ranked_run.OF_KIND)
def test_what_is_learned_of_a_teacher_and_of_rewards_is_the_host_s(card, kind, speaking):
    ranked_run.expect_as_on_the_host(speaking, kind, card)


@on_a_card
def test_text(card):
    path = GOLDEN / "qwen3-F16.gguf"
    on_host, on_card = (adapted(path, *b) for b in ((), (card,)))
    wanted = list(pyggml.generate(on_host, TOKENS, 60))
    assert list(pyggml.generate(on_card, TOKENS, 60)) == wanted
    assert len(set(wanted)) > 5


@on_a_card
def test_the_card_runs_ahead(card):
    """What it chooses is the greatest of the logits that the host gets for the same tokens."""
    model = adapted(GOLDEN / "qwen3-F16.gguf", card)
    assert runs_ahead(model)
    session, other = Session(model, 90), Session(model, 90)
    wanted, tokens = [], TOKENS
    for _ in range(60):
        wanted.append(int(other.feed(tokens).argmax()))
        tokens = wanted[-1:]
    assert list(islice(session.greedy(TOKENS), 60)) == wanted
    again = Session(model, 90).greedy(TOKENS)
    assert [next(again) for _ in range(3)] == wanted[:3]
    again.close()
