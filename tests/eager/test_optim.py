"""The optimisers of values take the engine's steps, and those of tensors the same."""

from functools import partial

import numpy as np
import pytest

from pyggml import ops
from pyggml.eager import tensor
from pyggml.eager.optim import SGD, AdamW
from pyggml.errors import ConfigError, GraphError, NoGradientError
from pyggml.graph.dtypes import F16
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
    with pytest.raises(ConfigError, match="a parameter stands twice, wanted each once"):
        SGD([p, p], lr=0.1)
    with pytest.raises(ConfigError, match="no parameters"):
        SGD([], lr=0.1)
    with pytest.raises(ConfigError, match=r"is no parameter.*; lr is -1"):
        SGD([p * 2, p], lr=-1)
    with pytest.raises(ConfigError, match="betas are"):
        AdamW([p], betas=(0.9, 1.0))
    with pytest.raises(NoGradientError, match="no gradient yet"):
        SGD([p], lr=0.1).step()


# -- of tensors ------------------------------------------------------------------------------------


def graph_of(p):
    """The loss of `pulled` as a tensor."""
    pull = leaf(PULL, "pull")
    return ops.add(ops.sum_(ops.mul(p, pull)), ops.scale(ops.sum_(ops.sqr(p)), 0.5))


@pytest.mark.parametrize(
    "make",
    [
        partial(AdamW, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2),
        partial(SGD, lr=0.1),
        partial(SGD, lr=0.1, momentum=0.7),
    ],
)
def test_tensors_take_the_steps_of_values(make):
    value, p = tensor(START, requires_grad=True), leaf(START.copy(), "p")
    of_values, of_tensors = make([value]), make([p], loss=graph_of(p))
    for n in range(6):
        of_values.lr = of_tensors.lr = 0.1 / (n + 1)  # a schedule
        of_values.zero_grad()
        loss = pulled(value)
        loss.backward()
        assert of_tensors.step() == pytest.approx(loss.item(), rel=1e-5)
        of_values.step()
        np.testing.assert_allclose(p.data, value.numpy(), rtol=2e-5, atol=2e-6)
    assert of_tensors.n == of_values.n == 6


def test_several_parameters_are_updated_after_every_gradient_is_known():
    a, b = leaf(np.float32([2.0])), leaf(np.float32([3.0]))
    assert SGD([a, b], lr=0.1, loss=ops.sum_(ops.mul(a, b))).step() == 6
    np.testing.assert_allclose([a.data[0], b.data[0]], [1.7, 2.8], rtol=1e-6)


def test_the_updates_are_nodes_of_the_graph():
    p = leaf(START.copy(), "p")
    nodes = AdamW([p], loss=graph_of(p)).program.schedule.graph.nodes
    (update,) = (t for t in nodes if t.op.name == "opt_step_adamw")
    assert update.src[0] is p and update.root is p


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p, v: AdamW([p]), r"loss is None"),
        (lambda p, v: AdamW([p], loss=ops.sqr(p)), r"loss is .*one number"),
        (lambda p, v: AdamW([p, v], loss=graph_of(p)), r"one kind"),
        (lambda p, v: AdamW([v], loss=graph_of(p)), r"loss is for tensors"),
        (lambda p, v: AdamW([ops.sqr(p)], loss=graph_of(p)), r"wanted a leaf in F32"),
        (lambda p, v: AdamW([zeros((3,), F16)], loss=graph_of(p)), r"wanted a leaf in F32"),
        (lambda p, v: AdamW([v]).loss, r"are values"),
    ],
)
def test_tensors_that_cannot_be_trained_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make(leaf(START.copy(), "p"), tensor(START, requires_grad=True))


def test_a_tensor_that_the_loss_does_not_depend_on_is_refused():
    p, other = leaf(START.copy(), "p"), leaf(START.copy(), "other")
    with pytest.raises(NoGradientError, match="other does not reach the loss"):
        SGD([p, other], lr=0.1, loss=graph_of(p)).step()
    with pytest.raises(GraphError, match="read-only"):
        fixed = np.ones((4, 3), np.float32)
        fixed.flags.writeable = False
        p = leaf(fixed)
        SGD([p], lr=0.1, loss=graph_of(p)).step()
