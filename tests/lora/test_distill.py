"""Distillation: every way to its loss and gradient, and that such a run is one like others."""

import numpy as np
import pytest
from tiny_models import write_llama

import pyggml
from pyggml.errors import ConfigError, ModelError
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.objectives.distill import Distill

from runs import steps

CTX, N_VOCAB = 20, 48


@pytest.fixture(scope="module")
def teacher_file(tmp_path_factory):
    """A larger model with as many tokens as the tiny one."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.gguf"
    return write_llama(path, N_VOCAB, n_layer=4, seed=7)


@pytest.fixture
def trainer_of(tiny, teacher_file, corpus_of):
    """(objective's settings, **train settings) -> a trainer whose adapter changes something."""

    def make(modules=None, corpus=None, teacher=teacher_file, train=None, **settings):
        train = {"lr": 0.02, "warmup_steps": 1, "batch": 2, "compute": "f32", **(train or {})}
        model = pyggml.load(tiny, compute="f32")
        adapter = attach(model, LoraConfig(rank=3, alpha=5.0, modules=modules))
        for name, pair in adapter.pairs.items():
            if name != "output.weight":
                pair.b.data[:] = np.random.default_rng(1).normal(0, 0.1, pair.b.shape)
        objective = Distill(teacher=str(teacher), **settings)
        run = (adapter.model, adapter.parameters, corpus or corpus_of(CTX), TrainConfig(**train))
        return Trainer(*run, objective)

    return make


def run(trainer):
    events = []
    trainer.run(events.append)
    return steps(events)


def test_whole_logits_and_all_tokens_give_the_same_numbers(trainer_of):
    """An adapter of the output matrix, here with a B of zeros, forbids the fused head; there are no
    more than 48 tokens. That the losses of steps are the formula's: test_parity.py."""
    runs = []
    for modules, most in ((("attn_q",), 48), (("attn_q", "output"), 48), (("attn_q",), 64)):
        of = {"teacher_top_k": most, "teacher_temperature": 2.5, "hard_weight": 0.3}
        train = {"grad_accum": 2, "max_steps": 1, "clip": 0.0}
        trainer = trainer_of(modules, **of, train=train)
        runs.append(([step.loss for step in run(trainer)], trainer.parameters.gradients))
    (losses, gradients), *others = runs
    for other, again in others:
        assert other == pytest.approx(losses, rel=2e-5)
        for name, g in gradients.items():
            atol = 1e-5 * np.abs(g.data).max()
            np.testing.assert_allclose(again[name].data, g.data, rtol=1e-3, atol=atol)


def test_the_teacher_itself_has_nothing_to_learn(trainer_of, tiny):
    trainer = trainer_of(teacher=tiny, hard_weight=0.0, train={"max_steps": 30})
    losses = [step.loss for step in run(trainer)]
    assert losses[0] > 0.01, "the adapter has moved it away"
    assert 0 < losses[-1] < 0.2 * losses[0]


def test_another_teacher_is_another_run(trainer_of, tiny, tmp_path):
    trainer_of(train={"max_steps": 2, "checkpoint_dir": str(tmp_path)}).run()
    with pytest.raises(pyggml.errors.CheckpointError, match="settings.teacher is sample"):
        trainer_of(teacher=tiny, train={"max_steps": 2}).resume(tmp_path / "step-00000002.gguf")


def test_a_teacher_is_wanted_that_reads_the_same_tokens(trainer_of, tmp_path, corpus_of):
    with pytest.raises(ConfigError, match="teacher is not given, wanted a GGUF model"):
        trainer_of(teacher="").reserve()
    short = write_llama(tmp_path / "s.gguf", N_VOCAB, 1, 3, keys={"llama.context_length": 16})
    with pytest.raises(ConfigError, match="ctx is 20, wanted at most the teacher's 16"):
        trainer_of(teacher=short).reserve()
    words = {"tokenizer.ggml.tokens": [f"w{i}" for i in range(N_VOCAB)]}
    other = write_llama(tmp_path / "o.gguf", N_VOCAB, 1, 3, keys=words)
    with pytest.raises(ModelError, match="has another vocabulary .*: token 0 is 'w0' there and"):
        trainer_of(teacher=other).reserve()
