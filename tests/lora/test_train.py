"""The loop: what a step computes, where it stops, and that a resumed run is the same run."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import CheckpointError, ConfigError, DataError, NoGradientError, PyggmlError
from pyggml.lora import (
    CheckpointReport,
    LoraConfig,
    Parameters,
    StepReport,
    TrainConfig,
    Trainer,
    ValidationReport,
    attach,
    loss_and_grads,
)
from pyggml.lora.optim import AdamW

LENGTHS = [30, 12, 7, 25, 9, 18, 22, 14]  # of documents; the last one is held out


@pytest.fixture
def trainer_of(tiny, corpus_of):
    """(lora settings, **train settings) -> a trainer of the tiny model with a fresh adapter."""

    def make(lora=None, path=tiny, corpus=None, **settings):
        settings = {"ctx": 10, "lr": 0.01, "warmup_steps": 2, "epochs": 2, **settings}
        model = pyggml.load(path)
        adapter = attach(model, LoraConfig(**{"rank": 3, "alpha": 5.0, **(lora or {})}))
        corpus = corpus or corpus_of(settings["ctx"], LENGTHS)
        return Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(**settings))

    return make


def state(trainer):
    p = trainer.parameters
    return [b.tobytes() for b in (p.data, p.m, p.v)] + [trainer.progress]


def steps(events):
    return [e for e in events if isinstance(e, StepReport)]


# -- one step -----------------------------------------------------------------------------------


def test_a_step_s_gradient_is_that_of_its_window(trainer_of, monkeypatch):
    monkeypatch.setattr("pyggml.model.FASTEST", "f32")  # windows of other lengths round otherwise
    trainer = trainer_of(batch=1, max_steps=1, clip=0.0, seed=3)
    model, train = trainer.model, trainer.corpus.train
    window = train.order(3, 0)[0]
    assert train.n_targets([window]) < 10  # it holds the end of a document
    events = []
    fresh = trainer_of(seed=3).model
    trainer.run(events.append)
    batch = next(train.batches([window], 1))
    total, grads = 0.0, dict.fromkeys(trainer.parameters.tensors, 0.0)
    for start in np.unique(batch.span[batch.weights > 0, 0]):
        inside = np.flatnonzero((batch.span[:, 0] == start) & (batch.weights > 0))
        ids = [*batch.tokens[inside], batch.targets[inside[-1]]]
        share = len(inside) / train.n_targets([window])
        loss, part = loss_and_grads(fresh, ids)
        total += share * loss
        grads = {name: grads[name] + share * g for name, g in part.items()}
    assert steps(events)[0].loss == pytest.approx(total, rel=1e-5)
    assert model.adapters
    for name, g in trainer.parameters.gradients.items():
        np.testing.assert_allclose(g.data, grads[name], rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("batch, grad_accum", [(4, 1), (2, 2), (3, 2)])
def test_accumulation_is_weighted_by_tokens(trainer_of, batch, grad_accum):
    one = trainer_of(batch=1, grad_accum=batch * grad_accum, max_steps=1, clip=0.0)
    many = trainer_of(batch=batch, grad_accum=grad_accum, max_steps=1, clip=0.0)
    events = []
    for trainer in (one, many):
        for pair in trainer.model.adapters[0].values():
            pair.b.data[:] = np.random.default_rng(1).normal(0, 0.1, pair.b.shape)
        trainer.run(events.append)
    a, b = steps(events)
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert a.n_tokens == b.n_tokens < 10 * batch * grad_accum
    np.testing.assert_allclose(
        one.parameters.gradient, many.parameters.gradient, rtol=1e-3, atol=2e-6
    )


def test_adamw_is_the_paper_s_on_the_clipped_gradient():
    rng = np.random.default_rng(0)
    config = TrainConfig(weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6, clip=0.5)
    parameters = Parameters({"a": (3, 5), "b": (17,)})
    start = {n: rng.standard_normal(t.shape) for n, t in parameters.tensors.items()}
    for n, t in parameters.tensors.items():
        t.data[:] = start[n]
    p = np.concatenate([a.ravel() for a in start.values()])
    m, v = np.zeros(32), np.zeros(32)
    optimiser = AdamW(parameters, config)
    for n in range(1, 4):
        g = rng.standard_normal(32) * n
        parameters.gradients["a"].data[:] = g[:15].reshape(3, 5)
        parameters.gradients["b"].data[:] = g[15:]
        assert optimiser.clip() == pytest.approx(np.linalg.norm(g), rel=1e-6)
        optimiser.step(0.01, n)
        g *= 0.5 / np.linalg.norm(g)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        p = p - 0.01 * (m / (1 - 0.8**n) / (np.sqrt(v / (1 - 0.95**n)) + 1e-6) + 0.1 * p)
    found = np.concatenate([t.data.ravel() for t in parameters.tensors.values()])
    np.testing.assert_allclose(found, p, rtol=1e-4, atol=1e-6)


def test_a_run_takes_adamw_s_steps_at_the_schedule_s_rates(trainer_of):
    trainer = trainer_of(max_steps=5, clip=0.0, weight_decay=0.1, lr_min=1e-4)
    p = trainer.parameters.data.astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)

    def follow(event):
        if isinstance(event, StepReport):
            n, g = event.step, trainer.parameters.gradient.astype(np.float64)
            assert event.lr == trainer.schedule(n - 1)
            m[:], v[:] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            hat = m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.999**n)) + 1e-8)
            p[:] -= event.lr * (hat + 0.1 * p)
            np.testing.assert_allclose(trainer.parameters.data, p, rtol=1e-4, atol=2e-6)

    trainer.run(follow)
    assert trainer.progress.step == 5


def test_validation_is_the_mean_loss_of_what_is_held_out(trainer_of, corpus_of):
    corpus = corpus_of(10, [30, 12, 21], n_held_out=1)
    trainer = trainer_of(corpus=corpus, max_steps=1)
    events = []
    trainer.run(events.append)
    first = next(e for e in events if isinstance(e, ValidationReport))
    model = trainer_of().model
    total = n = 0
    held_out = corpus.validation
    for window, documents in zip(held_out.tokens, held_out.documents, strict=True):
        ids = window[documents >= 0]
        if len(ids) > 1:
            total += loss_and_grads(model, ids)[0] * (len(ids) - 1)
            n += len(ids) - 1
    assert first.step == 0 and first.n_tokens == n
    assert first.loss == pytest.approx(total / n, rel=1e-5)


# -- a run --------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_reports_are_in_order(trainer_of):
    trainer = trainer_of(lr=0.03, epochs=8, batch=2, val_every=5, val_windows=1)
    reserved, events = trainer.reserve(), []
    assert reserved.arena > 0 and reserved.parameters == 4 * trainer.parameters.data.nbytes
    assert trainer.run(events.append)
    made = steps(events)
    assert [e.step for e in made] == list(range(1, trainer.n_steps + 1))
    assert {e.n_steps for e in made} == {trainer.n_steps}
    assert [e.epoch for e in made] == sorted(e.epoch for e in made) and made[-1].epoch == 7
    assert all(e.tokens_per_second > 0 for e in made)
    assert np.mean([e.loss for e in made[-6:]]) < 0.8 * np.mean([e.loss for e in made[:6]])
    validated = [e.step for e in events if isinstance(e, ValidationReport)]
    assert validated == sorted({*range(0, trainer.n_steps, 5), trainer.n_steps})


def test_the_number_of_threads_changes_no_bit(trainer_of):
    found = []
    for threads in (1, 2):
        trainer = trainer_of(threads=threads, max_steps=4, batch=2)
        trainer.run()
        found.append(state(trainer))
    assert found[0] == found[1]


def test_all_weights_of_a_model_can_be_trained(tiny_tied, corpus_of):
    model = pyggml.load(tiny_tied)
    weights = dict(model.parts.weights)
    parameters = Parameters({n: t.shape for n, t in weights.items()})
    for name, t in weights.items():
        parameters.tensors[name].data[:] = t.data
    model.parts = dataclasses.replace(model.parts, weights=parameters.tensors)
    config = TrainConfig(ctx=10, lr=0.02, epochs=6, warmup_steps=0)
    events = []
    Trainer(model, parameters, corpus_of(10, LENGTHS), config, fused=False).run(events.append)
    made = steps(events)
    assert np.mean([e.loss for e in made[-6:]]) < 0.7 * np.mean([e.loss for e in made[:6]])


def test_parameters_of_another_model_are_refused(tiny, corpus_of):
    stranger = attach(pyggml.load(tiny)).parameters
    trainer = Trainer(pyggml.load(tiny), stranger, corpus_of(10, LENGTHS), TrainConfig(ctx=10))
    with pytest.raises(NoGradientError, match="blk.0.attn_q.weight.lora_a does not reach the loss"):
        trainer.reserve()


def test_numbers_that_are_not_finite_stop_the_run_and_are_traced(trainer_of):
    trainer = trainer_of(max_steps=3)
    trainer.run(lambda e: trainer.stop() if isinstance(e, StepReport) else None)
    trainer.model.adapters[0]["blk.1.ffn_up.weight"].a.data[0, 0] = np.nan
    before = state(trainer)
    with pytest.raises(
        PyggmlError, match=r"^step 2: the loss is nan.*made by <.*mul_mat.*; lr may"
    ):
        trainer.run()
    assert state(trainer) == before


def test_settings_and_text_that_do_not_fit_the_model_are_refused(trainer_of, corpus_of):
    with pytest.raises(ConfigError, match="ctx is 100, wanted at most the model's 64; compute is"):
        trainer_of(ctx=100, compute="f32")
    with pytest.raises(ConfigError, match="ctx is 10, but the windows have 9 tokens"):
        trainer_of(corpus=corpus_of(9, LENGTHS))
    corpus = corpus_of(10, LENGTHS)
    corpus.train.tokens[0, 0] = 48
    with pytest.raises(DataError, match="wanted 0 to 47"):
        trainer_of(corpus=corpus)


def test_a_validation_that_is_no_number_ends_the_run(trainer_of, tmp_path):
    """As after one step too far: the checkpoint before it stays the newest."""
    trainer = trainer_of(max_steps=4, val_every=2, checkpoint_dir=str(tmp_path), checkpoint_every=1)

    def broken(event):
        if isinstance(event, StepReport) and event.step == 2:
            trainer.parameters.data[:] = np.nan

    with pytest.raises(
        PyggmlError, match="^after step 2 the validation loss is nan; lr may be too"
    ):
        trainer.run(broken)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.gguf"]


# -- stopping and resuming ----------------------------------------------------------------------


def stop_at(trainer, step, how):
    def report(event):
        if isinstance(event, StepReport) and event.step == step:
            if how == "flag":
                trainer.stop()
            else:
                raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("how", ["flag", "interrupt"])
@pytest.mark.parametrize("at", [3, 6])  # in the first epoch; in the second
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(trainer_of, tmp_path, how, at):
    settings = {"batch": 2, "grad_accum": 1, "epochs": 2, "seed": 5}
    whole, events = trainer_of(**settings), []
    whole.run(events.append)
    first = trainer_of(**settings, checkpoint_dir=str(tmp_path))
    assert not first.run(stop_at(first, at, how))
    assert first.progress.step == at and (first.progress.epoch == 1) == (at == 6)
    second = trainer_of(**settings, checkpoint_dir=str(tmp_path), threads=1)
    second.parameters.data[:] = 7  # whatever was there is replaced
    second.resume(tmp_path / f"step-{at:08d}.gguf")
    assert second.parameters.m.any() and second.parameters.v.any()
    rest = []
    assert second.run(rest.append)
    assert state(second) == state(whole)
    assert second.history == whole.history and len(whole.history.losses) == whole.progress.step
    assert [e.loss for e in steps(rest)] == [e.loss for e in steps(events)[at:]]


def test_a_run_resumes_with_layers_computed_again(trainer_of, tmp_path):
    settings = {"batch": 2, "grad_accum": 2, "epochs": 2, "seed": 5}
    whole = trainer_of(**settings)
    whole.run()
    first = trainer_of(**settings, checkpoint_dir=str(tmp_path), grad_checkpointing=True)
    first.run(stop_at(first, 2, "flag"))
    second = trainer_of(**settings, checkpoint_dir=str(tmp_path))
    second.resume(tmp_path / "step-00000002.gguf")
    assert second.run()
    assert state(second) == state(whole)
    nodes = [len(t.passes.training.graph.nodes) for t in (first, second)]
    assert nodes[0] > nodes[1]


def test_ctrl_c_in_the_middle_of_a_step_goes_back_to_the_last_whole_one(trainer_of, tmp_path):
    trainer = trainer_of(checkpoint_dir=str(tmp_path), grad_accum=2, max_steps=3)
    trainer.run(stop_at(trainer, 1, "flag"))
    before, train, calls = state(trainer), trainer.passes.train, []

    def interrupted(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(batch)

    trainer.passes.train = interrupted
    assert not trainer.run()
    assert state(trainer) == before
    trainer.passes.train = train
    trainer.run()
    whole = trainer_of(grad_accum=2, max_steps=3)
    whole.run()
    assert state(trainer) == state(whole)


def test_the_two_newest_checkpoints_are_kept(trainer_of, tmp_path):
    trainer = trainer_of(max_steps=7, checkpoint_dir=str(tmp_path / "a" / "b"), checkpoint_every=2)
    events = []
    trainer.run(events.append)
    saved = [e.step for e in events if isinstance(e, CheckpointReport)]
    assert saved == [2, 4, 6, 7]
    names = sorted(p.name for p in (tmp_path / "a" / "b").iterdir())
    assert names == ["step-00000006.gguf", "step-00000007.gguf"]


def test_a_new_run_does_not_write_among_another_run_s_checkpoints(trainer_of, tmp_path):
    trainer_of(max_steps=1, checkpoint_dir=str(tmp_path)).run()
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        trainer_of(max_steps=1, checkpoint_dir=str(tmp_path)).run()


OTHER_RUNS = [
    ({"lr": 0.02}, "settings.lr is 0.01 there and 0.02 here"),
    ({"seed": 9, "clip": 2.0}, "settings.clip is 1.0 .* settings.seed is 0 there and 9 here"),
    ({"ctx": 12}, "settings.ctx is 10 there and 12 here"),  # so the text differs, too
    ({"lora": {"rank": 2}}, "adapter.rank is 3 there and 2 here"),  # and each tensor's shape
    ({"lora": {"alpha": 6.0}}, "adapter.alpha is 5.0 there and 6.0 here"),
    (
        {"lora": {"modules": ("attn_q",)}},
        r"adapter.modules is not given there and \['attn_q'\] here",
    ),
    ({"path": "tiny_tied"}, "model is another model than that run's"),
    ({"corpus": 1}, "text is another text than that run's"),
]


@pytest.mark.parametrize("changes, message", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(
    trainer_of, corpus_of, request, tmp_path, changes, message
):
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path)).run()
    if "path" in changes:
        changes = {"path": request.getfixturevalue(changes["path"])}
    if "corpus" in changes:
        changes = {"corpus": corpus_of(10, LENGTHS, seed=1)}
    other = trainer_of(max_steps=2, **changes)
    before = state(other)
    with pytest.raises(CheckpointError, match=f"is of another run: {message}$"):
        other.resume(tmp_path / "step-00000002.gguf")
    assert state(other) == before


def damage(path: Path, how):
    raw = bytearray(path.read_bytes())
    if how == "a flipped bit":
        raw[-100] ^= 1
    elif how == "half of it":
        raw = raw[: len(raw) // 2]
    else:
        raw = bytearray(b"not a checkpoint")
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["a flipped bit", "half of it", "something else"])
def test_a_damaged_checkpoint_is_refused(trainer_of, tmp_path, how):
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path)).run()
    path = tmp_path / "step-00000002.gguf"
    damage(path, how)
    other = trainer_of(max_steps=2)
    before = state(other)
    with pytest.raises(CheckpointError, match="damaged|wanted a checkpoint"):
        other.resume(path)
    assert state(other) == before


def test_a_file_of_another_kind_is_no_checkpoint(trainer_of, tiny):
    with pytest.raises(CheckpointError, match="general.type is missing, wanted 'checkpoint'"):
        trainer_of().resume(tiny)


def test_nor_is_one_whose_kind_is_no_word(trainer_of, tmp_path):
    gguf.write(tmp_path / "a.gguf", {"general.type": np.arange(3)}, [])
    with pytest.raises(CheckpointError, match="general.type is .*, wanted 'checkpoint'"):
        trainer_of().resume(tmp_path / "a.gguf")
