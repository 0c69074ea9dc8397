"""The optimisers of values take the engine's steps."""

import numpy as np
import pytest

from pyggml.eager import tensor
from pyggml.eager.optim import SGD, AdamW
from pyggml.errors import ConfigError, NoGradientError
from pyggml.graph.tensor import leaf, zeros
from pyggml.ops import opt_step_adamw, opt_step_sgd
from pyggml.runtime import run

RNG = np.random.default_rng(3)
START, PULL = RNG.standard_normal((2, 4, 3)).astype(np.float32)


def pulled(p):
    return (p * PULL).sum() + 0.5 * (p * p).sum()


def test_adamw_takes_the_steps_of_opt_step_adamw():
    p, twin = tensor(START, requires_grad=True), leaf(START.copy())
    m, v = zeros(START.shape), zeros(START.shape)
    optimiser = AdamW([p], lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    for n in range(1, 6):
        optimiser.zero_grad()
        pulled(p).backward()
        hats = (1 / (1 - 0.8**n), 1 / (1 - 0.95**n))
        settings = leaf(np.array([0.1, 0.8, 0.95, 1e-6, 0.2, *hats], np.float32))
        run(opt_step_adamw(twin, leaf(p.grad), m, v, settings))
        optimiser.step()
        (known,) = run(twin)
        np.testing.assert_allclose(p.numpy(), known, rtol=2e-6, atol=2e-7)


def test_sgd_takes_the_steps_of_opt_step_sgd():
    p, twin = tensor(START, requires_grad=True), leaf(START.copy())
    pulled(p).backward()
    run(opt_step_sgd(twin, leaf(p.grad), leaf(np.array([0.1, 0], np.float32))))
    SGD([p], lr=0.1).step()
    np.testing.assert_allclose(p.numpy(), run(twin)[0], rtol=1e-6)


def test_momentum_keeps_what_was():
    p = tensor([1.0], requires_grad=True)
    optimiser = SGD([p], lr=0.1, momentum=0.5)
    for wanted in (0.9, 0.75):
        optimiser.zero_grad()
        p.sum().backward()
        optimiser.step()
        assert p.item() == pytest.approx(wanted)


def test_what_cannot_be_trained_is_refused():
    p = tensor([1.0], requires_grad=True)
    with pytest.raises(ConfigError, match="no parameters"):
        SGD([], lr=0.1)
    with pytest.raises(ConfigError, match=r"is no parameter.*; lr is -1"):
        SGD([p * 2, p], lr=-1)
    with pytest.raises(NoGradientError, match="no gradient yet"):
        SGD([p], lr=0.1).step()
