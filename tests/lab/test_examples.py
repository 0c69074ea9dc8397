"""Top examples: the same places and quantiles that all activations in memory give."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.errors import ConfigError
from pyggml.lab import activations_of, top_examples, windows_of
from pyggml.lab.examples import _keys, _number

DEMO = Path(__file__).parents[2] / "cli/demo"
NAME = "blk.1.ffn_neurons"


@pytest.fixture(scope="module")
def model():
    return pyggml.load(DEMO / "base.gguf", compute="f32")


@pytest.fixture(scope="module")
def text():
    return (DEMO / "shakespeare.txt").read_text(encoding="utf-8")[:6000]


@pytest.fixture(scope="module")
def all_values(model, text):
    """(n_windows of (T, n_neurons)), and the ids."""
    read = [*activations_of(model, windows_of(model, text, 32), NAME)]
    return [a[NAME] for _, a in read], np.concatenate([ids for ids, _ in read])


def test_the_strongest_places_of_all_windows(model, text, all_values):
    windows, ids = all_values
    found = top_examples(model, text, NAME, [5, 9], k=7, per_window=32, n_window=32)
    for n, examples in found.items():
        values = np.concatenate([np.r_[-np.inf, w[1:, n]] for w in windows])
        best = np.argsort(-values, kind="stable")[:7]
        assert [p.position for p in examples.places] == best.tolist()
        np.testing.assert_array_equal([p.value for p in examples.places], values[best])
        assert examples.n_tokens == len(ids)
        counted = np.concatenate([w[1:, n] for w in windows])
        assert examples.positive == pytest.approx((counted > 0).mean())
        for share, value in examples.quantiles.items():
            exact = np.quantile(counted, share, method="inverted_cdf")
            assert value == pytest.approx(exact, rel=0.004)


def test_one_place_a_window_by_default_with_its_context(model, text, all_values):
    windows, ids = all_values
    (examples,) = top_examples(model, text, NAME, [5], k=4, around=(3, 2), n_window=32).values()
    most = np.array([w[1:, 5].max() for w in windows])
    np.testing.assert_array_equal([p.value for p in examples.places], np.sort(most)[::-1][:4])
    for p in examples.places:
        assert p.values[p.at] == p.value and len(p.pieces) == len(p.values) <= 6
        around = ids[p.position - p.at :][: len(p.pieces)]
        assert "".join(p.pieces) == model.tokenizer.decode(around)
    shown = str(examples)
    assert f"{NAME} 5, {len(ids):,} tokens" in shown and "⟦" in shown
    assert len(shown.splitlines()) == 3 + 4
    page = examples.draw()
    assert page.count("<div>") == 4 and "t8" in page and page == examples._repr_html_()


def test_what_features_make_of_rows(model, text, all_values):
    windows, _ = all_values
    half = top_examples(
        model, text, NAME, [1], k=3, features=lambda x: -0.5 * x[:, 4:6], n_window=32
    )[1]
    least = min(w[1:, 5].min() for w in windows)
    assert half.places[0].value == pytest.approx(-0.5 * least)


def test_equal_activations_come_in_the_order_of_the_text(model, text):
    (found,) = top_examples(
        model, text, NAME, [0], k=4, per_window=3, n_window=16,
        features=lambda x: np.ones((len(x), 1), np.float32)).values()  # fmt: skip
    assert [p.position for p in found.places] == [1, 2, 3, 17]


def test_a_file_is_read_window_by_window(model, text, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    of_file, of_text = (top_examples(model, t, NAME, [3], k=3)[3] for t in (path, text))
    assert str(of_file) == str(of_text)


def test_nothing_of_a_text_is_markup_or_commands(model):
    examples = top_examples(model, "<script>\x1b[2J</script>" * 3, NAME, [0], k=2)[0]
    assert "<script" not in examples.draw() and "\x1b" not in str(examples)


@pytest.mark.quick
def test_keys_rise_with_numbers_and_are_near():
    rng = np.random.default_rng(0)
    x = np.sort(rng.standard_normal(2000).astype(np.float32) * 10.0 ** rng.integers(-6, 6, 2000))
    x = x.astype(np.float32)
    keys = _keys(x).astype(int)
    assert (np.diff(keys) >= 0).all()
    np.testing.assert_allclose([_number(k) for k in keys], x, rtol=0.004)
    assert [_number(int(k)) for k in _keys(np.array([0.0, -0.0], np.float32))] == [0, 0]


@pytest.mark.parametrize(
    ("name", "neurons", "settings", "said"),
    [
        (NAME, [100_000], {}, "no neuron 100000 among its"),
        (NAME, [-1], {}, "no neuron -1"),
        (NAME, [], {}, "some neurons"),
        (NAME, [1], {"k": 0}, "k and per_window of 1 or more"),
        ("blk.*.out", [1], {}, "fits 3 activations, wanted one"),
        ("blk.7.out", [1], {}, "no activation is named blk.7.out"),
    ],
)
def test_bad_input_is_named(model, name, neurons, settings, said):
    with pytest.raises(ConfigError, match=said):
        top_examples(model, "To be, or not to be", name, neurons, **settings)
