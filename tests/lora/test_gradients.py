"""Loss and gradients of adapters: masks, and blocks that are left out."""

import numpy as np
import pytest

import pyggml
from pyggml.errors import AdapterError, DataError
from pyggml.lora import LoraConfig, attach, loss_and_grads

TOKENS = np.arange(30) * 11 % 48


def attached(path, b_from=0, **settings):
    """A model with an adapter whose B is not zero in the blocks from `b_from` on."""
    model = pyggml.load(path, compute="f32")
    adapter = attach(model, LoraConfig(rank=4, alpha=6.0, **settings))
    for name, pair in adapter.pairs.items():
        if int(name.split(".")[1]) >= b_from:
            rng = np.random.default_rng(list(name.encode()))
            pair.b.data[:] = rng.normal(0, 0.1, pair.b.shape)
    return adapter.model


def log_softmax(logits):
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def test_the_mask_says_which_targets_count(tiny):
    model = attached(tiny)
    mask = np.zeros(30, bool)
    mask[[0, 4, 5, 29]] = True  # the first token is never a target
    losses = -log_softmax(model.logits(TOKENS))[np.arange(29), TOKENS[1:]]
    loss, grads = loss_and_grads(model, TOKENS, mask)
    assert loss == pytest.approx(losses[[3, 4, 28]].mean(), rel=1e-5)
    alone = [loss_and_grads(model, TOKENS, np.arange(30) == i)[1] for i in (4, 5, 29)]
    for name, g in grads.items():
        np.testing.assert_allclose(g, sum(a[name] for a in alone) / 3, rtol=1e-3, atol=1e-6)


def test_an_output_adapter_is_trained_too(tiny):
    config = LoraConfig(rank=2, alpha=3.0, modules=("output", "attn_q"))
    _, grads = loss_and_grads(attach(pyggml.load(tiny), config).model, TOKENS)
    assert grads["output.weight.lora_b"].shape == (48, 2)
    assert np.abs(grads["output.weight.lora_b"]).max() > 0


def test_blocks_without_adapters_cost_no_backward_pass(tiny):
    from pyggml.lora.trainer.passes import Passes

    nodes, found = [], []
    for skip in (0, 1, 2):
        model = pyggml.load(tiny)
        adapter = attach(model, LoraConfig(skip_layers=skip))
        nodes.append(len(Passes(adapter.model, adapter.parameters, 8).training.graph.nodes))
        found.append(loss_and_grads(attached(tiny, b_from=2, skip_layers=skip), TOKENS))
    assert nodes[0] - nodes[1] > 40 and nodes[1] - nodes[2] > 40
    assert all(name.startswith("blk.2.") for name in found[2][1])
    for name, g in found[2][1].items():
        np.testing.assert_array_equal(found[1][1][name], g)
        np.testing.assert_allclose(found[0][1][name], g, rtol=1e-4, atol=1e-6)


FAULTY = [
    ([3], None, "1 token, wanted at least 2"),
    ([3] * 66, None, "65 tokens and a target, wanted at most the 64 of the model's context"),
    ([3, 48], None, "wanted 0 to 47"),
    ([3, 4, 5], np.ones(2, bool), r"mask is bool of shape \(2,\), wanted bool \(3,\)"),
    ([3, 4, 5], np.ones(3), "mask is float64"),
    ([3, 4, 5], np.array([True, False, False]), "the mask counts no target"),
]


@pytest.mark.parametrize("tokens, mask, message", FAULTY)
def test_what_does_not_fit_is_explained(tiny, tokens, mask, message):
    with pytest.raises(DataError, match=message):
        loss_and_grads(attached(tiny), tokens, mask)


def test_a_model_without_an_adapter_or_with_two_is_refused(tiny):
    model = pyggml.load(tiny)
    with pytest.raises(AdapterError, match="has no adapter"):
        loss_and_grads(model, TOKENS)
    pairs = attach(model).pairs
    twice = model.with_adapters(pairs, pairs)
    with pytest.raises(AdapterError, match="blk.0.attn_q.weight has two updates"):
        loss_and_grads(twice, TOKENS)
