"""Sparse coders: their formulas, their training, and their use on a model."""

from pathlib import Path

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml import lab
from pyggml.errors import ConfigError, DataError, ShapeError
from pyggml.graph.arrays import read
from pyggml.lab import CoderConfig, JumpRelu, Relu, SparseCoder, TopK, assess_coder, train_coder
from pyggml.lab import sparse_training as training_rules

GOLDEN = Path(__file__).parents[1] / "golden/models/llama-Q8_0.gguf"
DEMO = Path(__file__).parents[2] / "cli/demo/base.gguf"
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def coder_of(activate, n_in, n_out, reads, writes, n_features=24):
    return SparseCoder(
        reads, writes, activate, normal(n_in, n_features), normal(n_features),
        normal(n_features, n_out), normal(n_out), reads == writes,
    )  # fmt: skip


def by_hand(coder, x):
    """Features and what is made of them, in float64."""
    z = (x - coder.b_dec if coder.centred else x).astype(np.float64) @ coder.w_enc + coder.b_enc
    f = np.maximum(z, 0)
    if isinstance(coder.activate, TopK):
        f[z < np.sort(z, axis=-1)[..., -coder.activate.k, None]] = 0
    if isinstance(coder.activate, JumpRelu):
        f[z <= coder.activate.threshold] = 0
    return f, f @ coder.w_dec + coder.b_dec


KINDS = [Relu(), TopK(3), JumpRelu(np.linspace(0, 4, 24, dtype=np.float32))]


@pytest.fixture(scope="module")
def model():
    return pyggml.load(GOLDEN, compute="f32")


@pytest.fixture(scope="module")
def demo():
    return pyggml.load(DEMO, compute="f32")


@pytest.mark.quick
@pytest.mark.parametrize("activate", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("n_out", [8, 5])
def test_features_and_what_they_make(activate, n_out):
    coder = coder_of(activate, 8, n_out, "x", "x" if n_out == 8 else "y")
    x = normal(2, 7, 8)
    f, y = by_hand(coder, x)
    found = coder.encode(x)
    np.testing.assert_allclose(found, f, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(coder.decode(found), y, rtol=1e-4, atol=1e-4)
    assert 0 < (found > 0).mean() < 0.8 and f"24 features ({activate.name}) → {n_out}" in str(coder)


@pytest.mark.parametrize("activate", KINDS, ids=lambda a: a.name)
def test_a_feature_is_a_metric_and_an_edit(model, activate):
    name, n = "blk.1.out", model.config.n_embd
    coder, ids = coder_of(activate, n, n, name, name), np.arange(6) + 3
    with model.trace(name) as t:
        model.logits(ids)
    x, (f, _) = t[name], by_hand(coder, t[name])
    feature = int(f[4].argmax())
    g = model.grad(coder.metric(feature, position=4), ids, name)
    assert g.metric == pytest.approx(f[4, feature], rel=1e-4)
    np.testing.assert_allclose(g[name][4], coder.w_enc[:, feature], rtol=1e-4, atol=1e-5)
    assert not g[name][:4].any()
    with model.trace(name, add={name: coder.steer(feature, 7.0)}, tokens=[2, 4]) as t:
        model.logits(ids)
    wanted = x.copy()
    for i in (2, 4):
        wanted[i] += (7.0 - f[i, feature]) * coder.direction(feature)
    np.testing.assert_allclose(t[name], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("writes", ["blk.1.ffn_norm", "blk.1.ffn_out"])
def test_what_a_coder_makes_takes_the_activation_s_place_text_by_text(model, writes):
    reads, n = "blk.1.ffn_norm", model.config.n_embd
    coder = coder_of(TopK(4), n, n, reads, writes)
    texts = [np.arange(5), np.arange(8) + 20]
    with model.trace(reads, writes) as before:
        model.logits(texts)
    with model.trace(writes, replace=coder.replacement(), tokens=range(1, 5)) as t:
        model.logits(texts)
    for i in range(2):
        wanted = np.array(before[writes][i])
        wanted[1:5] = by_hand(coder, before[reads][i])[1][1:5]
        np.testing.assert_allclose(t[writes][i], wanted, rtol=1e-4, atol=1e-4)


def dictionary(n_rows, n_true=20, n=12, k=2):
    """Rows that are sums of a few of some directions, and these (n_true, n)."""
    rng = np.random.default_rng(1)
    directions = rng.standard_normal((n_true, n)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    f = np.zeros((n_rows, n_true), np.float32)
    for row in f:
        row[rng.choice(n_true, k, replace=False)] = rng.uniform(1, 3, k)
    return f @ directions + 0.5, directions


CONFIGS = [
    CoderConfig(32, TopK(2), n_steps=600, lr=3e-3, dead_after=10),
    CoderConfig(32, Relu(), sparsity=1.0, n_steps=600, lr=3e-3, dead_after=10),
    CoderConfig(32, JumpRelu, sparsity=0.3, n_steps=1000, lr=3e-3, dead_after=10),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: getattr(c.activate, "name", "jumprelu"))
def test_training_finds_the_directions_that_rows_are_made_of(config):
    rows, directions = dictionary(4000)
    done = train_coder(rows, config, reads="x")
    coder, last = done.coder, done.steps[-1]
    np.testing.assert_allclose(np.linalg.norm(coder.w_dec, axis=1), 1, rtol=1e-5)
    nearest = (directions @ coder.w_dec.T).max(axis=1)
    assert np.median(nearest) > 0.8, nearest
    features = coder.encode(rows)
    left = np.square(rows - coder.decode(features)).sum() / np.square(rows - rows.mean(0)).sum()
    assert left == pytest.approx(last.error, abs=0.03) and left < 0.15
    assert (features > 0).sum(1).mean() == pytest.approx(last.l0, rel=0.1) and last.l0 < 8
    assert last.loss < done.steps[0].loss and "features a row" in str(last)


def test_rows_of_any_size_train_the_same_coder():
    """Scales are put into the weights: features and what they make scale with the rows."""
    rows, _ = dictionary(500)
    config = CoderConfig(16, JumpRelu, sparsity=0.3, n_steps=20)
    small, large = (train_coder(s * rows, config).coder for s in (1, 64))
    np.testing.assert_allclose(
        large.encode(64 * rows), 64 * small.encode(rows), rtol=1e-3, atol=0.1
    )
    np.testing.assert_allclose(
        large.decode(large.encode(64 * rows)), 64 * small.decode(small.encode(rows)),
        rtol=1e-3, atol=0.1)  # fmt: skip


def test_a_run_repeats_bit_for_bit_and_another_seed_gives_another():
    rows, _ = dictionary(400)
    one, same, other = (
        train_coder(rows, CoderConfig(16, TopK(2), n_steps=10, seed=s)).coder for s in (3, 3, 4)
    )
    np.testing.assert_array_equal(one.w_enc, same.w_enc)
    np.testing.assert_array_equal(one.w_dec, same.w_dec)
    assert np.abs(one.w_enc - other.w_enc).max() > 0.1


@pytest.mark.parametrize("activate", [TopK(2), Relu(), JumpRelu], ids=["topk", "relu", "jumprelu"])
def test_dead_features_come_back(activate, monkeypatch):
    """Against a run in which nothing brings them back."""
    rows, _ = dictionary(2000)
    dead = []
    monkeypatch.setattr(training_rules, "_FIRST_THRESHOLD", 6.0)  # above every input
    for lift in (0.1, 0.0):
        monkeypatch.setattr(training_rules, "_LIFT", lift)
        config = CoderConfig(256, activate, sparsity=8.0, n_steps=300, lr=3e-3, dead_after=20)
        dead.append(train_coder(rows, config).steps[-1].n_dead)
    assert dead[0] < 0.7 * dead[1] and dead[1] > 10, dead


def test_a_transcoder_learns_another_activation():
    rows, _ = dictionary(3000)
    outputs = np.maximum(rows @ np.random.default_rng(2).standard_normal((12, 7)), 0)
    done = train_coder(rows, CoderConfig(64, Relu(), sparsity=0.01, n_steps=800, lr=3e-3),
                       outputs=outputs, reads="a", writes="b")  # fmt: skip
    coder = done.coder
    assert (coder.reads, coder.writes, coder.centred) == ("a", "b", False)
    left = np.square(outputs - coder.decode(coder.encode(rows))).sum()
    assert left / np.square(outputs - outputs.mean(0)).sum() < 0.1


def test_the_report_is_what_can_be_counted(demo):
    text = (DEMO.parent / "shakespeare.txt").read_text(encoding="utf-8")[:4000]
    name, n = "blk.1.out", demo.config.n_embd
    coder = coder_of(TopK(40), n, n, name, name, n_features=300)
    report = assess_coder(demo, coder, text, n_windows=3, n_window=48)
    windows = [*lab.windows_of(demo, text, 48)][:3]
    x = np.concatenate([a[name][1:] for _, a in lab.activations_of(demo, windows, name)])
    f, y = by_hand(coder, x)
    assert report.n_tokens == len(x) and report.l0 == pytest.approx((f > 0).sum(1).mean(), rel=1e-3)
    share = 1 - np.square(x - y).sum() / np.square(x - x.mean(0)).sum()
    assert report.explained == pytest.approx(share, rel=1e-3)
    assert report.active == pytest.approx((f > 0).any(0).mean(), abs=0.01)
    losses = [pyggml.lens.token_losses(demo, w).mean() for w in windows]
    assert report.loss == pytest.approx(np.mean(losses), rel=1e-5)
    with demo.trace(replace={name: lambda a: a * 0}, tokens=range(1, 48)):
        zero = [pyggml.lens.token_losses(demo, w).mean() for w in windows]
    assert report.loss_zero == pytest.approx(np.mean(zero), rel=1e-5)
    assert report.recovered == pytest.approx(
        (report.loss_zero - report.loss_coder) / (report.loss_zero - report.loss))  # fmt: skip
    assert f"{report.recovered:.1%} recovered" in str(report)


def test_a_coder_that_writes_what_it_reads_recovers_all(demo):
    text = (DEMO.parent / "shakespeare.txt").read_text(encoding="utf-8")[:2000]
    n = demo.config.n_embd
    both = np.concatenate([np.eye(n), -np.eye(n)]).astype(np.float32)
    coder = SparseCoder("blk.1.out", "blk.1.out", Relu(), both.T.copy(), np.zeros(2 * n, "f"),
                        both, np.zeros(n, "f"), True)  # fmt: skip
    report = assess_coder(demo, coder, text, n_windows=2, n_window=32)
    assert report.recovered == pytest.approx(1, abs=1e-4) and report.explained > 0.9999


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_features": 0}, "n_features is 0"),
        ({"activate": TopK(17)}, "k is 17, wanted 1 to the 16"),
        ({"activate": "relu"}, "activate is 'relu', wanted"),
        ({"sparsity": -1}, "sparsity is -1"),
        ({"lr": float("nan")}, "lr is nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, said):
    with pytest.raises(ConfigError, match=said):
        CoderConfig(**{"n_features": 16, "activate": Relu(), **settings})


def test_rows_that_cannot_be_learned_are_named(demo):
    config = CoderConfig(16, Relu(), n_steps=1)
    for rows, outputs, said in [
        (normal(300), None, r"rows \(300,\)"),
        (normal(300, 4), normal(299, 4), r"\(299, 4\), wanted two axes, and as many"),
        (normal(255, 4), None, "255 rows, wanted at least the 256"),
        (np.ones((300, 4), np.float32), None, "all alike, or not finite"),
        (normal(300, 4) * np.nan, None, "all alike, or not finite"),
    ]:
        with pytest.raises(DataError, match=said):
            train_coder(rows, config, outputs=outputs)
    coder = coder_of(Relu(), 8, 5, "a", "b")
    with pytest.raises(ShapeError, match="wanted 8 along its last axis"):
        coder.encode(normal(3, 9))
    with pytest.raises(ConfigError, match="no feature 24 among 24"):
        coder.metric(24)
    with pytest.raises(ConfigError, match="reads a and writes b: add a multiple"):
        coder.steer(3, 1.0)
    with pytest.raises(ConfigError, match="no activation is named a"):
        assess_coder(demo, coder, "To be, or not to be " * 99, n_windows=1, n_window=16)
    with pytest.raises(DataError, match="the text has 0 windows of 128 tokens"):
        assess_coder(demo, coder, "To be")


def losses_in_torch(torch, config, p, x, y, dead, sparsity, centred):
    """The loss, by SAELens' own autograd functions, and which features are active."""
    jump = pytest.importorskip("sae_lens.saes.jumprelu_sae")
    width = training_rules._BANDWIDTH
    d = p["w_dec"] / p["w_dec"].norm(dim=1, keepdim=True)
    z = (x - p["b_dec"] if centred else x) @ p["w_enc"] + p["b_enc"]
    goal, penalty = 0.0, 0.0
    if isinstance(config.activate, TopK):
        top = z.topk(config.activate.k, dim=-1)
        f = torch.zeros_like(z).scatter(-1, top.indices, top.values.relu())
        goal = top.values[:, -1:].detach()
    elif isinstance(config.activate, Relu):
        f = z.relu()
        penalty = f.sum(-1).mean()
    else:
        f = jump.JumpReLU.apply(z, p["threshold"], width, False)
        penalty = jump.Step.apply(z, p["threshold"], width, False).sum(-1).mean()
        goal = p["threshold"].detach()
    left = y - (f @ d + p["b_dec"])
    loss = (left**2).sum(-1).mean() + sparsity * penalty
    lack = ((goal - z).relu() * dead).sum(-1).mean()
    return loss + training_rules._LIFT * lack, (f > 0).any(0)


@pytest.mark.interop
@pytest.mark.parametrize("activate", [TopK(3), Relu(), JumpRelu], ids=["topk", "relu", "jumprelu"])
@pytest.mark.parametrize("n_out", [12, 7])
def test_pytorch_trains_the_same_coder(activate, n_out):
    """From the same first weights, on the same batches, by its AdamW."""
    torch = need("torch")
    rows, _ = dictionary(600)
    y = None if n_out == 12 else rows @ normal(12, n_out)
    config = CoderConfig(40, activate, sparsity=0.4, n_steps=20, n_batch=64, dead_after=2)
    net = training_rules._CoderNet(rows, y, config)
    names = ("w_enc", "b_enc", "w_dec", "b_dec", "threshold")
    p = {n: torch.tensor(read(getattr(net, n)), requires_grad=True) for n in names}
    optimiser = torch.optim.AdamW(p.values(), lr=1e-3, weight_decay=0.0)
    x_all, y_all = rows * net.scale_in, (rows if y is None else y) * net.scale_out
    quiet, losses = np.zeros(40, int), []
    batches = training_rules._batches(600, config)
    for step, chosen in zip(range(20), batches, strict=False):
        x, goal = (torch.tensor(a[chosen].astype(np.float32)) for a in (x_all, y_all))
        dead = torch.tensor(quiet >= 2)
        loss, active = losses_in_torch(
            torch, config, p, x, goal, dead, 0.4 * min(1, step / 2), y is None)  # fmt: skip
        optimiser.param_groups[0]["lr"] = 1e-3 * min(1, (20 - step) / 4)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        quiet = np.where(active.numpy(), 0, quiet + 1)
    done = train_coder(rows, config, outputs=y)
    np.testing.assert_allclose([s.loss for s in done.steps], losses, rtol=1e-4)
    ours, scale = done.coder, net.scale_in / net.scale_out
    np.testing.assert_allclose(
        ours.w_enc, p["w_enc"].detach() * scale, rtol=1e-4, atol=1e-4 * scale
    )
    d = torch.nn.functional.normalize(p["w_dec"].detach(), dim=1)
    np.testing.assert_allclose(ours.w_dec, d, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        ours.b_dec * net.scale_out, p["b_dec"].detach(), rtol=1e-4, atol=1e-4
    )
    assert any(s.n_dead for s in done.steps) == isinstance(activate, TopK)
