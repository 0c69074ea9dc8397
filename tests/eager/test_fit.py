"""fit: epochs of a graph whose inputs hold a batch."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from pyggml import fit, ops
from pyggml.eager import tensor
from pyggml.eager.optim import SGD, AdamW
from pyggml.errors import ConfigError
from pyggml.graph.tensor import leaf, zeros

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(5)
X = RNG.standard_normal((12, 3)).astype(np.float32)
Y = X @ np.float32([[1.0], [-2.0], [0.5]])


class Line:
    """y = x·wᵀ in batches of four rows, and a loss in squares."""

    def __init__(self, batch=4):
        self.x, self.y = zeros((batch, 3), name="x"), zeros((batch, 1), name="y")
        self.w = zeros((1, 3), name="w")
        off = ops.sub(ops.mul_mat(self.w, self.x), self.y)
        self.loss = ops.mean(ops.reshape(ops.sqr(off), (1, batch)))
        self.data = {self.x: X, self.y: Y}


def test_a_line_is_learned():
    line = Line()
    shown = []
    epochs = fit(SGD([line.w], lr=0.1, loss=line.loss), line.data, 60, report=shown.append)
    np.testing.assert_allclose(line.w.data, [[1.0, -2.0, 0.5]], atol=1e-3)
    assert epochs == shown and [e.number for e in epochs] == list(range(1, 61))
    assert epochs[-1].loss < 1e-5 < epochs[0].loss and epochs[0].held_out is None
    assert str(epochs[0]) == f"epoch 1: loss {epochs[0].loss:.4f}"


def test_every_row_is_learned_once_an_epoch_in_a_new_order():
    """With lr 0 the loss of an epoch is that of all rows, whatever the order."""
    line, orders = Line(), []
    optimiser = SGD([line.w], lr=0.0, loss=line.loss)
    step = optimiser.step
    optimiser.step = lambda: orders.append(line.x.data[:, 0].copy()) or step()
    epochs = fit(optimiser, line.data, 2)
    assert epochs[0].loss == pytest.approx(float(np.mean(Y * Y)), rel=1e-5)
    first, second = np.concatenate(orders[:3]), np.concatenate(orders[3:])
    np.testing.assert_array_equal(np.sort(first), np.sort(X[:, 0]))
    np.testing.assert_array_equal(np.sort(second), np.sort(first))
    assert not np.array_equal(first, second)


def test_rows_that_are_held_out_are_never_learned():
    line, seen = Line(), []
    optimiser = SGD([line.w], lr=0.05, loss=line.loss)
    step = optimiser.step
    optimiser.step = lambda: seen.append(line.x.data[:, 0].copy()) or step()
    epochs = fit(optimiser, line.data, 5, held_out=1 / 3)
    learned = {*np.concatenate(seen).tolist()}
    assert len(learned) == 8 and len(seen) == 10
    held = [i for i in range(12) if float(X[i, 0]) not in learned]
    after = np.mean((X[held] @ line.w.data.T - Y[held]) ** 2)
    assert epochs[-1].held_out == pytest.approx(float(after), rel=1e-5)
    assert str(epochs[0]).endswith(f"held out {epochs[0].held_out:.4f}")


def test_the_seed_decides():
    results = []
    for seed in (1, 1, 2):
        line = Line()
        fit(AdamW([line.w], lr=0.1, loss=line.loss), line.data, 2, seed=seed)
        results.append(line.w.data.tobytes())
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda d, line: {**d, leaf(np.zeros((4, 3), np.float32)): X}, {}, "no input of the loss"),
        (lambda d, line: {**d, line.y: X}, {}, r"rows of \[3\] do not fit"),
        (lambda d, line: {line.x: X[:11], line.y: Y[:11]}, {}, "11 rows in batches of 4"),
        (lambda d, line: {**d, line.y: Y[:8]}, {}, "wanted one pair"),
        (lambda d, line: {}, {}, "0 inputs"),
        (lambda d, line: d, {"held_out": 0.9}, "held_out is 0.9"),
        (lambda d, line: d, {"held_out": -0.1}, "held_out is -0.1"),
        (lambda d, line: d, {"n_epochs": 0}, "n_epochs is 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, settings, words):
    line = Line()
    optimiser = SGD([line.w], lr=0.1, loss=line.loss)
    with pytest.raises(ConfigError, match=words):
        fit(optimiser, change(line.data, line), **{"n_epochs": 1, **settings})


def test_values_are_refused():
    line = Line()
    with pytest.raises(ConfigError, match="are values"):
        fit(SGD([tensor([1.0], requires_grad=True)], lr=0.1), line.data, 1)


def test_the_example_learns_a_curve(capsys):
    runpy.run_path(str(ROOT / "examples/sine.py"))["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[-1].startswith("epoch 500: loss 0.00")
    assert float(lines[-1].split()[-1]) < 0.01
