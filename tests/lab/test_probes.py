"""Linear probes: their minimum, what they are worth on rows held out, and their use on a model."""

from pathlib import Path

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.lab import fit_probe, linear_probes
from pyggml.lab.logistic import logistic_regression

MODEL = Path(__file__).parents[1] / "golden/models/llama-Q8_0.gguf"
RNG = np.random.default_rng(3)
X = RNG.standard_normal((300, 10)).astype(np.float32) * RNG.uniform(0.2, 3, 10).astype(np.float32)
X += 1.5
SIGNS = X[:, 0] - X[:, 3] + 0.5 * RNG.standard_normal(300) > 0
KINDS = np.array(["noun", "verb", "name"])[RNG.integers(0, 3, 300)]
X[KINDS == "verb", 5] += 3
NUMBERS = X @ np.arange(10.0) + RNG.standard_normal(300)


@pytest.fixture(scope="module")
def model():
    return pyggml.load(MODEL, compute="f32")


@pytest.mark.parametrize("n_classes", [2, 4])
def test_the_gradient_is_zero_at_the_minimum(n_classes):
    """Written out in float64: softmax(z) − onehot, and l2 · w."""
    number = RNG.integers(0, n_classes, 300)
    w, b = logistic_regression(X, number, n_classes, l2=0.01)
    if n_classes == 2:
        w, b, decay = np.stack([0 * w[0], w[0]]), np.array([0, b[0]]), np.array([[0], [0.01]])
    else:
        decay = 0.01
    z = X.astype(np.float64) @ w.T + b
    p = np.exp(z - z.max(1, keepdims=True))
    g = p / p.sum(1, keepdims=True) - np.eye(n_classes)[number]
    grad = g.T @ X / 300 + decay * w
    assert np.abs(grad[n_classes == 2 :]).max() < 1e-4
    assert np.abs(g.mean(0)).max() < 1e-4


@pytest.mark.quick
def test_scores_are_those_of_rows_held_out():
    probe = fit_probe(X, SIGNS, seed=5)
    assert probe.n_rows == (225, 75)
    held = np.random.default_rng(5).permutation(300)[:75]
    right = (probe.predict(X[held]) == SIGNS[held]).mean()
    assert probe.score.value == pytest.approx(right)
    assert probe.score.low < right < probe.score.high < 1
    assert probe.score.low > probe.baseline > 0.4
    again = fit_probe(X, SIGNS, seed=5)
    np.testing.assert_array_equal(again.weights, probe.weights)


def test_rows_of_one_group_are_never_on_both_sides():
    """A probe that knows a group's rows by heart is worth nothing on other groups."""
    groups = np.repeat(np.arange(30), 10)
    rows = np.eye(30, dtype=np.float32)[groups]
    classes = np.random.default_rng(0).integers(0, 2, 30)[groups]
    assert fit_probe(rows, classes).score.value > 0.9
    by_group = fit_probe(rows, classes, groups)
    assert by_group.score.value == by_group.baseline and by_group.n_rows == (220, 80)
    assert by_group.score.high - by_group.score.low > 0.4, "8 groups are 8 observations"


def test_classes_keep_their_words_and_directions():
    probe = fit_probe(X, KINDS)
    assert probe.classes.tolist() == ["name", "noun", "verb"] and probe.weights.shape == (3, 10)
    verb = probe.direction("verb")
    assert verb.argmax() == 5 and np.linalg.norm(verb) == pytest.approx(1)
    moved = probe.predict(X + 20 * verb)
    assert (moved == "verb").all()
    with pytest.raises(ConfigError, match=r"of is 'adverb', wanted one of \['name', 'noun'"):
        probe.direction("adverb")


def test_numbers_are_fitted_by_least_squares():
    probe = fit_probe(X, NUMBERS, l2=1e-7)
    np.testing.assert_allclose(probe.weights[0], np.arange(10), atol=0.3)
    assert probe.classes is None and 0.98 < probe.score.low < probe.score.value < 1
    noise = fit_probe(X, RNG.standard_normal(300))
    assert noise.score.value < 0.1, "nothing is read where there is nothing"


def test_a_table_by_layer_its_metric_and_its_direction(model):
    texts = [RNG.integers(0, 90, n) for n in RNG.integers(5, 12, 24)]
    targets = [ids % 7 == 0 for ids in texts]  # of each token
    table = linear_probes(model, texts, targets, "token_embd", "blk.*.out", l2=1e-5)
    assert [*table] == ["token_embd", *(f"blk.{i}.out" for i in range(model.config.n_layer))]
    for line in (*table, "95 % of samples", "rows held out"):
        assert line in str(table)
    probe, ids = table["blk.1.out"], texts[0]
    with model.trace(probe.name) as t:
        model.logits(ids)
    g = model.grad(probe.metric(2), ids, probe.name)
    assert g.metric == pytest.approx(probe.scores(t[probe.name])[2, 0], rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(g[probe.name][2], probe.weights[0], rtol=1e-5, atol=1e-6)
    with model.trace(add={probe.name: 3 * probe.direction()}):
        steered = model.grad(probe.metric(2), ids, probe.name).metric
    assert steered - g.metric == pytest.approx(3 * np.linalg.norm(probe.weights), rel=1e-3)


def test_one_target_a_text_is_that_of_the_mean_over_its_positions(model):
    texts = [np.full(4, i) for i in range(40)]
    table = linear_probes(model, texts, [float(i) for i in range(40)], "token_embd", l2=1e-6)
    with model.trace("token_embd") as t:
        model.logits(texts[7])
    np.testing.assert_allclose(
        table["token_embd"].predict(t["token_embd"][1:].mean(0)),
        table["token_embd"].predict(t["token_embd"][0]), rtol=1e-5, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "targets", "settings", "error", "said"),
    [
        (X, SIGNS[:-1], {}, DataError, r"rows \(300, 10\), targets \(299,\)"),
        (X * np.nan, SIGNS, {}, DataError, "NaN or infinity"),
        (X, np.ones(300, bool), {}, DataError, "are of class True, wanted two"),
        (X, SIGNS, {"groups": np.zeros(300)}, DataError, "of one group or text"),
        (X, SIGNS, {"l2": 0}, ConfigError, "l2 is 0"),
        (X, SIGNS, {"held_out": 1.0}, ConfigError, "held_out 1.0"),
    ],
)
def test_what_cannot_be_fitted_is_named(rows, targets, settings, error, said):
    with pytest.raises(error, match=said):
        fit_probe(rows, targets, **settings)


def test_texts_and_targets_may_be_matrices(model):
    texts = np.random.default_rng(0).integers(0, 90, (12, 6))
    lists, matrix = (
        linear_probes(model, t, y, "blk.0.out")["blk.0.out"]
        for t, y in (([*texts], [*(texts % 2)]), (texts, texts % 2))
    )
    np.testing.assert_array_equal(lists.weights, matrix.weights)


def test_texts_that_do_not_fit_are_named(model):
    with pytest.raises(DataError, match="2 texts and 1 targets"):
        linear_probes(model, [[1, 2], [3, 4]], [True], "blk.0.out")
    with pytest.raises(DataError, match="text 2 has 3 tokens, and 2 targets"):
        linear_probes(model, [[1, 2], [3, 4, 5]], [[0, 1], [0, 1]], "blk.0.out")
    with pytest.raises(DataError, match="text 2 has 1 tokens, none at the positions"):
        linear_probes(model, [[1, 2], [3]], [True, False], "blk.0.out")


@pytest.mark.interop
@pytest.mark.parametrize("target", ["classes", "signs", "numbers"])
def test_scikit_learn_finds_the_same(target):
    linear = need("sklearn.linear_model")
    y = {"classes": KINDS, "signs": SIGNS, "numbers": NUMBERS}[target]
    l2, probe = 0.02, fit_probe(X, y, l2=0.02)
    learned = np.ones(300, bool)
    learned[np.random.default_rng(0).permutation(300)[:75]] = False
    x = X[learned].astype(np.float64)
    penalty = 225 * l2 * np.square(x - x.mean(0)).mean()  # of weights of rows as they are
    if target == "numbers":
        twin = linear.Ridge(alpha=penalty).fit(x, y[learned])
        np.testing.assert_allclose(probe.predict(X), twin.predict(X), rtol=1e-4, atol=1e-4)
    else:
        twin = linear.LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=5000)
        theirs = twin.fit(x, y[learned]).decision_function(X).reshape(300, -1)
        np.testing.assert_allclose(probe.scores(X), theirs, rtol=1e-4, atol=2e-4)
    found = twin.score(X[~learned], y[~learned])
    if target != "numbers":
        assert probe.score.value == pytest.approx(found)
