"""Routers of mixtures: the balance loss against transformers' formula, its gradient, its report."""

import json

import numpy as np
import pytest

import pyggml
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.lora import ValidationReport
from pyggml.lora.record.records import record_of
from pyggml.models.balance import Routing, balance_loss, expert_load
from pyggml.runtime import bind, schedule

from peers.files import GOLDEN
from runs import state, steps

MIXTURE = GOLDEN / "qwen3moe.gguf"  # 2 layers, 6 experts, 2 of them for each token


def of_transformers(logits, chosen, is_text):
    """`load_balancing_loss_func` in NumPy: logits (layers, T, E), chosen (layers, T, k)."""
    n_expert = logits.shape[-1]
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    mask = np.broadcast_to(is_text, logits.shape[:2])[..., None].astype(np.float64)
    one_hot = np.eye(n_expert)[chosen]  # (layers, T, k, E)
    f = (one_hot * mask[..., None]).sum(axis=(0, 1)) / mask.sum()
    mean = (p * mask).sum(axis=(0, 1)) / mask.sum()
    return n_expert * (f * mean).sum()


def test_the_loss_is_transformers_s(rng):
    logits = rng.normal(0, 1, (3, 7, 5)).astype(np.float32)
    chosen = np.argsort(-logits, axis=-1)[..., :2].astype(np.int32)
    is_text = np.array([1, 1, 1, 0, 1, 1, 0], bool)
    routings = [Routing(leaf(x, "x"), leaf(c, "c")) for x, c in zip(logits, chosen, strict=True)]
    share = leaf((is_text / is_text.sum()).astype(np.float32), "share")
    load = expert_load(routings, share)
    loss = balance_loss(routings, share, load)
    program = bind(schedule(Graph.of(loss=loss, load=load), pyggml.load(MIXTURE).devices))
    program()
    got = float(program.read(program.schedule.graph["loss"]))
    assert got == pytest.approx(of_transformers(logits, chosen, is_text), rel=1e-6)
    counts = (np.eye(5)[chosen] * is_text[:, None, None]).sum(axis=(1, 2)) / is_text.sum()
    np.testing.assert_allclose(program.read(program.schedule.graph["load"]), counts, rtol=1e-6)


@pytest.fixture
def mixture_of(trainer_of):
    """(**settings) → a trainer of the mixture's routers and queries."""

    def make(**settings):
        lora = {"rank": 4, "modules": ("ffn_gate_inp", "attn_q")}
        given = {"lr": 0.05, "epochs": 3, "batch": 2, "val_every": 4} | settings
        return trainer_of(lora=lora, path=MIXTURE, load={"compute": "f32"}, **given)

    return make


def test_the_gradient_is_the_slope(mixture_of):
    """The derivative along a direction of all parameters of factor · balance loss."""
    trainer, plain = mixture_of(router_aux_loss_coef=0.5), mixture_of()
    rng, (batch,) = np.random.default_rng(1), trainer.corpus.train.batches(np.array([0, 1]), 2)
    start = trainer.parameters.data + rng.normal(0, 0.1, trainer.parameters.data.shape)
    direction = rng.normal(0, 1, start.shape)
    gradients = []
    for each in (trainer, plain):
        each.parameters.data[:] = start
        each.parameters.gradient[:] = 0
        each.passes.train(batch)
        gradients.append(each.parameters.gradient.astype(np.float64).copy())
    losses = []
    for sign in (1, -1):
        trainer.parameters.data[:] = start + sign * 1e-3 * direction
        trainer.passes.evaluate(batch)
        losses.append(float(trainer.passes.outputs["balance_loss"]))
    slope = 0.5 * (losses[0] - losses[1]) / 2e-3
    assert (gradients[0] - gradients[1]) @ direction == pytest.approx(slope, rel=0.02, abs=1e-5)


def test_routers_become_more_even(mixture_of):
    """With a large factor, on the texts that are learned; the first validation's loss has none."""
    first, last = [], []
    for factor in (0.0, 20.0):
        events = []
        mixture_of(router_aux_loss_coef=factor, epochs=10).run(events.append)
        first.append(events[0].loss)
        last.append(np.mean([e.experts.balance for e in steps(events)[-6:]]))
    assert first[0] == first[1]
    assert last[1] < last[0] - 0.3  # 2 where all are loaded alike


def test_a_resumed_run_with_layers_computed_again_is_the_same(mixture_of, tmp_path):
    settings = {"router_aux_loss_coef": 0.1}
    whole = mixture_of(**settings)
    whole.run()
    first = mixture_of(**settings, checkpoint_dir=str(tmp_path))
    first.run(lambda event: first.stop() if first.progress.step == 2 else None)
    second = mixture_of(**settings, grad_checkpointing=True)
    second.resume(tmp_path / "step-00000002.gguf")
    second.run()
    assert state(second) == state(whole)


def test_what_is_told_is_what_the_routers_chose(mixture_of):
    trainer = mixture_of()
    events = []
    trainer.run(events.append)
    report = next(e for e in events if isinstance(e, ValidationReport))
    load = report.experts.load
    assert load.shape == (2, 6) and np.allclose(load.mean(axis=1), 1)
    assert report.experts.busiest == load.max() and f"{load.max():.1f} ×" in report.experts.words
    held_out = json.loads(json.dumps(record_of(report)))["experts"]
    assert np.allclose(held_out["load"], load, atol=1e-3)
    assert "load" not in record_of(steps(events)[0])["experts"]


def test_a_dense_model_has_none(trainer_of):
    events = []
    trainer_of().run(events.append)
    assert all(e.experts is None for e in events) and "experts" not in record_of(events[0])
