"""Gradients of metrics: slopes of what a user writes, by activations, adapters and weights."""

import numpy as np
import pytest
from separate_cpu import SeparateCPU

import pyggml
from pyggml import functions as F
from pyggml.errors import ConfigError, DataError, NoGradientError, ShapeError
from pyggml.graph.arrays import read, write
from pyggml.lora import LoraConfig, attach, loss_and_grads

IDS = np.arange(1, 13)


@pytest.fixture(scope="module")
def model(golden_file):
    return pyggml.load(golden_file("llama-F16.gguf"), compute="f32")


def difference(t):
    """A logit difference."""
    return t["logits"][-1, 7] - t["logits"][-1, 5]


def probe(t):
    """A probe's score beside a norm and a probability."""
    x = t["blk.0.out"]
    score = (x[3] * np.linspace(-1, 1, 256, dtype=np.float32)).sum()
    return score + (x**2).mean().sqrt() + F.log_softmax(t["logits"])[-2, 9]


def number(model, metric, **changes):
    with model.trace(**changes):
        return model.grad(metric, IDS, "logits" if metric is difference else "blk.1.out").metric


@pytest.mark.parametrize("metric", [difference, probe])
@pytest.mark.parametrize("name", ["token_embd", "blk.0.attn_q", "blk.0.v", "blk.0.ffn_out"])
def test_a_gradient_by_an_activation_is_the_slope_of_the_metric(model, metric, name):
    found = model.grad(metric, IDS, name, "blk.1.out")
    assert list(found) == [name, "blk.1.out"]
    x, g = found.at[name], found[name]
    v = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    h = 0.01 * float(x.std())
    up, down = (number(model, metric, add={name: s * v}) for s in (h, -h))
    slope = (up - down) / (2 * h)
    assert slope == pytest.approx(float((g * v).sum()), abs=0.02 * float(np.linalg.norm(g)))


def test_the_metric_itself_is_what_numpy_makes_of_the_activations(model):
    with model.trace("blk.0.out") as t:
        z = model.logits(IDS).astype(np.float64)
    x = t["blk.0.out"].astype(np.float64)
    wanted = x[3] @ np.linspace(-1, 1, 256) + np.sqrt((x**2).mean())
    wanted += z[-2, 9] - np.log(np.exp(z[-2]).sum())
    assert model.grad(probe, IDS, "blk.0.out").metric == pytest.approx(wanted, abs=1e-4)


def test_the_loss_as_a_metric_has_the_gradients_of_the_loss(model):
    adapter = attach(model, LoraConfig(rank=3, alpha=5.0))
    rng = np.random.default_rng(1)
    for p in adapter.parameters.tensors.values():
        write(p, rng.standard_normal(p.shape).astype(np.float32) * 0.1)
    with adapter.model.trace("blk.1.out") as t:
        loss, wanted = loss_and_grads(adapter.model, IDS)
    found = adapter.model.grad(
        lambda t: F.cross_entropy(t["logits"], IDS[1:]), IDS[:-1], "*.lora_*", "blk.1.out"
    )
    assert found.metric == pytest.approx(loss, abs=1e-6)
    assert len(wanted) == len(found) - 1 > 10
    for name, g in {**wanted, "blk.1.out": t.grad("blk.1.out")}.items():
        scale = np.abs(g).max()
        np.testing.assert_allclose(found[name], g, rtol=0, atol=2e-5 * scale, err_msg=name)


@pytest.mark.parametrize("file", ["llama-F16.gguf", "llama-Q8_0.gguf", "qwen2-Q4_K_M.gguf"])
def test_a_gradient_by_a_weight_is_what_its_rows_multiply(golden_file, file):
    """dW = Σ_t dy_t x_tᵀ, whatever W's type; of the embedding, dx in its tokens' rows."""
    model = pyggml.load(golden_file(file), compute="f32")
    matrix, y, x = "blk.1.attn_output.weight", "blk.1.attn_output", "blk.1.attention"
    g = model.grad(probe, IDS, y, x, matrix)
    assert model.parts.weights[matrix].dtype.name in ("F16", "Q8_0", "Q4_K")
    wanted = g[y].astype(np.float64).T @ g.at[x]
    assert g[matrix].shape == wanted.shape == model.parts.weights[matrix].shape
    np.testing.assert_allclose(g[matrix], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    def of_embeddings(t):
        return (t["blk.0.out"] * t["blk.0.out"]).sum()

    g = model.grad(of_embeddings, IDS, "token_embd", "token_embd.weight")
    rows = np.zeros(g["token_embd.weight"].shape)
    np.add.at(rows, IDS, g["token_embd"])
    np.testing.assert_allclose(g["token_embd.weight"], rows, rtol=0, atol=1e-4)


def test_a_gradient_is_computed_on_the_model_s_device(model):
    device = SeparateCPU()
    elsewhere = pyggml.load(model.file.path, compute="f32", backends=[device])
    names = "blk.0.out", "blk.1.ffn_up.weight"
    before = device.launches
    here, there = (m.grad(difference, IDS, *names) for m in (model, elsewhere))
    assert device.launches > before
    for name in names:
        np.testing.assert_allclose(there[name], here[name], rtol=0, atol=1e-5)


def test_second_derivatives_are_those_of_a_quadratic_form(model):
    """z = W x is linear in x: d²(Σ z²)/dx² = 2 WᵀW, here of the last token, summed over a row."""

    def squares(t):
        return (t["logits"][-1] ** 2).sum()

    found = model.grad(lambda t: t.grad(squares, "output_norm").sum(), IDS, "output_norm")
    name = "output.weight" if "output.weight" in model.parts.weights else "token_embd.weight"
    w = read(model.parts.weights[name]).astype(np.float64)
    wanted = 2 * w.T @ (w @ np.ones(w.shape[1]))
    np.testing.assert_allclose(found["output_norm"][-1], wanted, rtol=1e-4, atol=1e-3)
    assert not found["output_norm"][:-1].any()
    with pytest.raises(NoGradientError, match=r"rms_norm\w*back.* has no gradient \(second deriv"):
        model.grad(lambda t: t.grad(squares, "blk.1.out").sum(), IDS, "blk.0.out")


def test_a_second_derivative_through_neurons_is_the_slope_of_the_first(model):
    """Through the units of a feed-forward part, whose gate is curved."""

    def energy(t):
        return (t["blk.1.ffn_down"][-1] ** 2).sum().log()

    def along(t):
        return (t.grad(energy, "blk.1.ffn_gate") * weights).sum()

    weights = np.random.default_rng(2).standard_normal((12, 512)).astype(np.float32)
    found = model.grad(along, IDS, "blk.1.ffn_gate")
    x, h = found.at["blk.1.ffn_gate"], 1e-2
    v, ends = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32), []
    for step in (h, -h):
        with model.trace(add={"blk.1.ffn_gate": step * v}):
            g = model.grad(energy, IDS, "blk.1.ffn_gate")["blk.1.ffn_gate"]
            ends.append(float((g * weights).sum()))
    slope = (ends[0] - ends[1]) / (2 * h)
    wanted = float((found["blk.1.ffn_gate"] * v).sum())
    assert slope == pytest.approx(wanted, rel=0.02) and abs(slope) > 1e-3


def test_traces_change_what_is_differentiated_and_read_it(model):
    plain = model.grad(difference, IDS, "blk.1.out")
    with model.trace("blk.1.out", "blk.0.out", scale={"blk.1.ffn_out": 0.0}) as t:
        found = model.grad(difference, IDS, "blk.1.out", "blk.1.attn_out")
        z = model.logits(IDS)
    assert found.metric == pytest.approx(float(z[-1, 7] - z[-1, 5]), abs=1e-5)
    assert abs(found.metric - plain.metric) > 1e-3
    np.testing.assert_array_equal(t.grad("blk.1.out"), found["blk.1.out"])
    np.testing.assert_array_equal(t.runs("blk.1.out")[0], found.at["blk.1.out"])
    assert "blk.1.attn_out" not in t and len(t.runs("blk.0.out")) == 2


MISTAKES = [
    (lambda t: t["logits"], "blk.0.out", ShapeError, r"shape \(12, 512\), wanted one number"),
    (lambda t: 3.0, "blk.0.out", ShapeError, "the metric gave 3.0, wanted a number made of act"),
    (lambda t: t["logit"].sum(), "*.out", ConfigError, "named logit: did you mean 'logits'"),
    (lambda t: t["logits"][12, 0], "*.out", ShapeError, "12 is none of 12 positions"),
    (lambda t: t["logits"].max() > 1, "*.out", ShapeError, "has no numbers yet: they are there"),
    (lambda t: t["logits"].argmax(), "*.out", ShapeError, "logits has no numbers yet"),
    (lambda t: t["logits"].sum().backward(), "*.out", NoGradientError, "model.grad differentiates"),
    (lambda t: t["blk.0.out"].sum(), "blk.1.out", NoGradientError, "not depend on blk.1.out"),
    (difference, "blk.0.outt", ConfigError, "weight is named blk.0.outt: did you mean 'blk.0.out'"),
    (difference, "blk.0.attn_q.weight.lora_a", ConfigError, "tensor or weight is named blk.0.attn"),
]


@pytest.mark.parametrize(("metric", "name", "error", "said"), MISTAKES)
def test_mistakes_are_named(model, metric, name, error, said):
    with pytest.raises(error, match=said):
        model.grad(metric, IDS, name)


def test_what_is_missing_is_named(model):
    with pytest.raises(ConfigError, match="grad takes names to differentiate by"):
        model.grad(difference, IDS)
    with pytest.raises(DataError, match="empty, wanted at least one token"):
        model.grad(difference, [], "blk.0.out")


def test_an_activation_is_shown_without_numbers(model):
    shown = []
    model.grad(lambda t: shown.append(repr(t["blk.0.out"])) or difference(t), IDS, "blk.0.out")
    assert shown == ["activation(shape (12, 256), blk.0.out, from add of add and blk.0.ffn_down)"]


def test_heads_and_patterns_are_differentiated(model):
    """They are made on demand; what all heads have is what each has. A pattern's slope by hand."""

    def of_one_head(t):
        return difference(t) + t["blk.1.attn_head.1"].sum()

    g = model.grad(of_one_head, IDS, "blk.1.attn_head.*", "blk.1.attention")
    heads = np.concatenate([g[f"blk.1.attn_head.{i}"] for i in range(4)], axis=1)
    np.testing.assert_allclose(g["blk.1.attention"], heads, rtol=0, atol=1e-6)
    plain = model.grad(difference, IDS, "blk.1.attention")["blk.1.attention"]
    one = np.arange(256) // 64 == 1
    np.testing.assert_allclose(heads - plain, np.tile(one, (12, 1)), rtol=0, atol=1e-5)
    alone = model.grad(lambda t: t["blk.1.attn_head.1"].sum(), IDS, "blk.1.v")
    assert alone.metric == pytest.approx(float(g.at["blk.1.attn_head.1"].sum()), abs=1e-3)
    g = model.grad(difference, IDS, "blk.1.attn_pattern", "blk.1.attention", "blk.1.v")
    dy = g["blk.1.attention"].reshape(12, 4, 64)
    wanted = np.einsum("thd,shd->ths", dy, np.repeat(g.at["blk.1.v"], 2, axis=1))
    np.testing.assert_allclose(g["blk.1.attn_pattern"], wanted, rtol=0, atol=1e-5)
