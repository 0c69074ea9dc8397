"""Optimisers against their formulas, and through checkpoints."""

import numpy as np
import pytest

from pyggml import gguf
from pyggml.errors import ConfigError, PyggmlError
from pyggml.lora import Parameters, TrainConfig, Trainer
from pyggml.lora.optim import OPTIMISERS, FlatAdamW, FlatLion, FlatMuon, adamw_8bit, kept_bytes

from runs import state, steps


def test_lion_takes_steps_of_the_sign_alone():
    parameters = Parameters({"a": (3, 5), "b": (7,)}, rates={"b": 4.0})
    config = TrainConfig(optimiser="lion", beta1=0.8, beta2=0.95, weight_decay=0.3, clip=0.0)
    rng = np.random.default_rng(0)
    optimiser = FlatLion(parameters, config)
    p = {name: rng.normal(size=t.shape) for name, t in parameters.tensors.items()}
    for name, t in parameters.tensors.items():
        t.data[:] = p[name]
    m = {name: np.zeros(t.shape) for name, t in parameters.tensors.items()}
    for n in range(1, 4):
        for name, gradient in parameters.gradients.items():
            g = rng.normal(size=gradient.shape)
            gradient.data[:] = g
            lr = 0.01 * (4 if name == "b" else 1)
            p[name] = p[name] * (1 - lr * 0.3) - lr * np.sign(0.8 * m[name] + 0.2 * g)
            m[name] = 0.95 * m[name] + 0.05 * g
        optimiser.step(0.01, n)
    for name, t in parameters.tensors.items():
        np.testing.assert_allclose(t.data, p[name], rtol=1e-5, atol=1e-6)
    assert not parameters.v.any()


def test_muon_takes_orthogonal_steps_of_matrices_and_adamw_s_of_the_rest():
    """Twenty steps of the formula; a wide, a tall matrix, two experts, a norm and a table."""
    blocks = {"blk.0.wide": (12, 20), "blk.0.tall": (20, 12), "blk.0.experts": (2, 8, 6)}
    parameters = Parameters({**blocks, "blk.0.norm": (7,), "table": (5, 4)}, rates={"table": 2})
    config = TrainConfig(optimiser="muon", weight_decay=0.3, clip=0.0)
    rng, optimiser = np.random.default_rng(0), FlatMuon(parameters, config)
    other = Parameters(
        {name: t.shape for name, t in parameters.tensors.items()}, rates={"table": 2}
    )
    twin, m = FlatAdamW(other, config), {name: np.zeros(shape) for name, shape in blocks.items()}
    parameters.data[:] = other.data[:] = rng.normal(size=parameters.data.size)
    w = {name: parameters.tensors[name].data.astype(np.float64) for name in blocks}
    for n in range(1, 21):
        parameters.gradient[:] = other.gradient[:] = rng.normal(size=parameters.data.size)
        for name, shape in blocks.items():
            g = parameters.gradients[name].data.astype(np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            x = 0.9 * m[name] + 0.1 * g
            x /= np.sqrt((x**2).sum((-2, -1), keepdims=True))
            for _ in range(5):
                s = x @ x.swapaxes(-2, -1)
                x = 3.4445 * x + (-4.775 * s + 2.0315 * s @ s) @ x
            w[name] = w[name] * (1 - 0.01 * 0.3) - 0.01 * 0.2 * max(shape[-2:]) ** 0.5 * x
        optimiser.step(0.01, n)
        twin.step(0.01, n)
    for name, t in parameters.tensors.items():
        np.testing.assert_allclose(t.data, w.get(name, other.tensors[name].data), atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_a_step_that_clips_has_the_bits_of_one_by_a_gradient_that_is_short(name):
    """The gradient stays as it is; a step after it that nobody asked to clip does not."""
    rng, shapes = np.random.default_rng(0), {"a": (70, 130), "b": (7,)}
    g = rng.standard_normal((2, Parameters(shapes, rates={"b": 4}).gradient.size), np.float32)
    clipped, plain = runs = [Parameters(shapes, rates={"b": 4}) for _ in range(2)]
    for p, limit in zip(runs, (0.5, 0.0), strict=True):
        config = TrainConfig(optimiser=name, weight_decay=0.1, clip=limit)
        optimiser = OPTIMISERS[name](p, config)
        p.data[:], p.gradient[:] = 1, g[0]
        length = optimiser.clip()
        assert length == pytest.approx(np.linalg.norm(g[0].astype(np.float64)), rel=1e-7)
        if p is plain:
            p.gradient *= np.float32(0.5 / np.sqrt((g[0].astype(np.float64) ** 2).sum()))
        optimiser.step(0.01, 1)
        assert np.array_equal(p.gradient, g[0]) == (p is clipped)
        p.gradient[:] = g[1]
        optimiser.step(0.01, 2)
    for part in ("data", "m", "v"):
        assert getattr(clipped, part).tobytes() == getattr(plain, part).tobytes()


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_learns_and_resumes_bit_for_bit(trainer_of, tmp_path, name):
    lr = 1.0 if name == "sgd" else 0.003
    settings = {"optimiser": name, "lr": lr, "batch": 2, "weight_decay": 0.1, "epochs": 3}
    whole, events = trainer_of(**settings), []
    whole.run(events.append)
    assert steps(events)[-1].loss < steps(events)[0].loss
    first = trainer_of(**settings, checkpoint_dir=str(tmp_path), checkpoint_every=2)
    first.run(lambda event: first.stop() if first.progress.step == 2 else None)
    second = trainer_of(**settings)
    second.resume(tmp_path / "step-00000002.gguf")
    second.run()
    assert state(second) == state(whole)
    with gguf.open(tmp_path / "step-00000002.gguf") as file:
        kept = {f"{name}.{m}" for m in OPTIMISERS[name].state_arrays(whole.parameters)}
        assert set(file.tensors) == {"parameters", *kept}


def test_lion_keeps_one_moment_less_and_sgd_none(trainer_of):
    adamw, lion, sgd = (
        trainer_of(optimiser=name).reserve().parameters for name in ("adamw", "lion", "sgd")
    )
    assert (lion, sgd) == (adamw * 3 // 4, adamw // 2)
    assert trainer_of(grad_accum=2).reserve().parameters == adamw * 5 // 4, "and the step's sum"


@pytest.mark.parametrize(("optimiser", "n_moments"), [("adamw", 2), ("lion", 1), ("sgd", 0)])
def test_moments_are_kept_and_the_best_parameters_if_wanted(optimiser, n_moments):
    p = Parameters({"a": (3, 5)})
    for keep_best in (False, True):
        config = TrainConfig(optimiser=optimiser, keep_best=keep_best)
        assert kept_bytes(config, p) == (n_moments + keep_best) * p.data.nbytes


def test_8_bit_moments_take_a_quarter_and_small_tensors_keep_float32():
    p = Parameters({"a": (64, 100), "small": (7,)})
    n_codes = 2 * p.data.size
    assert kept_bytes(TrainConfig(optimiser="adamw8bit"), p) == n_codes + 2 * 4 * (25 + 7)


# -- steps within the backward pass ---------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_in_the_backward_pass_make_the_same_bits(trainer_of, monkeypatch, name):
    monkeypatch.setattr(adamw_8bit, "LEAST", 64)
    settings = {"optimiser": name, "lr": 0.003, "batch": 2, "clip": 0.0, "max_steps": 3}
    after, within = trainer_of(**settings), trainer_of(**settings, step_in_backward=True)
    for trainer in (after, within):
        trainer.run()
    assert state(within) == state(after)
    assert within.history.losses == after.history.losses
    assert after.parameters.gradient.any() and not within.parameters.gradient.any()
    held = (trainer.reserve().parameters for trainer in (after, within))
    work = after.optimiser.work_bytes
    assert next(held) - next(held) == within.parameters.gradient.nbytes + work


def test_they_clip_by_the_norm_of_the_step_before(trainer_of):
    settings = {"optimiser": "sgd", "weight_decay": 0.0, "step_in_backward": True, "max_steps": 3}
    clipped, events = trainer_of(**settings, clip=0.01, lr=0.1, warmup_steps=0), []
    rates = [clipped.learning_rate(i) for i in range(3)]
    clipped.run(events.append)
    norms = [e.grad_norm for e in steps(events)]
    assert min(norms) > 0.02

    def rate(step, n_steps, history):
        return rates[step] * (0.01 / norms[step - 1] if step else 1.0)

    t, config = trainer_of(), TrainConfig(**settings, clip=0.0)
    plain = Trainer(t.model, t.parameters, t.corpus, config, schedule=rate)
    plain.run()
    np.testing.assert_allclose(plain.history.losses, clipped.history.losses, rtol=1e-6)
    np.testing.assert_allclose(plain.parameters.data, clipped.parameters.data, rtol=0, atol=1e-7)


def test_a_loss_that_is_not_finite_changes_no_parameter(trainer_of):
    trainer = trainer_of(step_in_backward=True, max_steps=2)
    p = trainer.parameters

    def spoil(event):
        p.data[0] = np.nan

    with pytest.raises(PyggmlError, match=r"step 1: the loss is nan.*first number that is not"):
        trainer.run(spoil)  # after the validation before the first step
    assert np.isfinite(p.data[1:]).all() and not p.m.any()


def test_gradients_that_are_added_up_are_refused():
    with pytest.raises(ConfigError, match="grad_accum is 2, wanted 1: steps in the backward"):
        TrainConfig(step_in_backward=True, grad_accum=2)
