"""Optimisers against their formulas, and through checkpoints."""

import numpy as np
import pytest

from pyggml import gguf
from pyggml.lora import Parameters, TrainConfig
from pyggml.lora.optim import OPTIMISERS, FlatLion, n_kept

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
        kept = {f"{name}.{m}" for m in OPTIMISERS[name].moments}
        assert set(file.tensors) == {"parameters", *kept}


def test_lion_keeps_one_moment_less_and_sgd_none(trainer_of):
    adamw, lion, sgd = (
        trainer_of(optimiser=name).reserve().parameters for name in ("adamw", "lion", "sgd")
    )
    assert (lion, sgd) == (adamw * 3 // 4, adamw // 2)
    assert trainer_of(grad_accum=2).reserve().parameters == adamw * 5 // 4, "and the step's sum"


@pytest.mark.parametrize(("optimiser", "n_moments"), [("adamw", 2), ("lion", 1), ("sgd", 0)])
def test_moments_are_kept_and_the_best_parameters_if_wanted(optimiser, n_moments):
    for keep_best in (False, True):
        config = TrainConfig(optimiser=optimiser, keep_best=keep_best)
        assert n_kept(config) == n_moments + keep_best
