"""Distillation: its loss by the formula, its gradient; and that such a run is one like others."""

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

    def make(fused=True, corpus=None, teacher=teacher_file, train=None, **settings):
        train = {"lr": 0.02, "warmup_steps": 1, "batch": 2, "compute": "f32", **(train or {})}
        model = pyggml.load(tiny, compute="f32")
        modules = None if fused else ("attn_q", "output")
        adapter = attach(model, LoraConfig(rank=3, alpha=5.0, modules=modules))
        for pair in adapter.pairs.values():
            pair.b.data[:] = np.random.default_rng(1).normal(0, 0.1, pair.b.shape)
        objective = Distill(teacher=str(teacher), **settings)
        run = (adapter.model, adapter.parameters, corpus or corpus_of(CTX), TrainConfig(**train))
        return Trainer(*run, objective)

    return make


def run(trainer):
    events = []
    trainer.run(events.append)
    return steps(events)


def log_softmax(z):
    z = z.astype(np.float64) - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def expected(trainer, teacher, windows):
    """The mean over the learned tokens of these windows, from whole logits."""
    data, o, losses = trainer.corpus.train, trainer.objective, []
    for w in windows:
        for number in np.unique(data.documents[w][data.documents[w] >= 0]):
            ids = data.tokens[w][data.documents[w] == number]
            z, t = (m.logits(ids)[:-1] for m in (trainer.model, teacher))
            losses += [token_loss(*pair, o) for pair in zip(z, t, ids[1:], strict=True)]
    return np.mean(losses)


def token_loss(z, t, target, o):
    q = np.exp(log_softmax(t / o.teacher_temperature))
    log_p = log_softmax(z / o.teacher_temperature)
    chosen = np.argsort(-q, kind="stable")[: o.teacher_top_k]
    if target not in chosen:
        chosen[-1] = target
    kl = (q[chosen] * (np.log(q[chosen]) - log_p[chosen])).sum()
    if len(others := np.delete(np.arange(len(q)), chosen)):
        kl += q[others].sum() * np.log(q[others].sum() / np.exp(log_p[others]).sum())
    ce = -log_softmax(z)[target]
    return o.hard_weight * ce + (1 - o.hard_weight) * o.teacher_temperature**2 * kl


SETTINGS = [
    {"teacher_top_k": 5},
    {"teacher_top_k": 5, "teacher_temperature": 2.5, "hard_weight": 0.3},
    {"teacher_top_k": 64, "hard_weight": 0.0},  # more than there are tokens
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_loss_is_the_formula(settings, fused, trainer_of, teacher_file):
    """Also over two batches, and where an adapter of the output matrix forbids the fused head."""
    trainer = trainer_of(fused, **settings, train={"grad_accum": 2, "max_steps": 1})
    windows = trainer.corpus.train.order(0, 0)[:4]
    wanted = expected(trainer, pyggml.load(teacher_file, compute="f32"), windows)
    (step,) = run(trainer)
    assert step.loss == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_are_slopes(settings, trainer_of):
    trainer = trainer_of(**settings, train={"max_steps": 1, "grad_accum": 2, "clip": 0.0})
    p, train = trainer.parameters, trainer.corpus.train
    trainer.passes.bind()
    along = np.random.default_rng(8).standard_normal(p.data.size).astype(np.float32)
    p.gradient[:] = 0
    over, windows = trainer.losses.over, train.order(0, 0)[:4]
    over(train, windows, alone=False)
    slope, start, values = float(p.gradient @ along), p.data.copy(), []
    for step in (1e-3, -1e-3):
        p.data[:] = start + np.float32(step) * along
        values.append(over(train, windows, alone=True).loss)
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(slope, rel=0.02)


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
