"""Passages: texts as windows of ids, files piece by piece, and activations of each window."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.errors import ConfigError, DataError, NotFiniteError
from pyggml.lab import activation_rows, activations_of, windows_of

DEMO = Path(__file__).parents[2] / "cli/demo"
GOLDEN = Path(__file__).parents[1] / "golden/models"
WORDS = "The king said to her: my lord, come home.\n" * 400


@pytest.fixture(scope="module")
def model():
    return pyggml.load(DEMO / "base.gguf", compute="f32")


def test_a_file_gives_the_tokens_of_its_text_whatever_its_pieces(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pyggml.lab.passages._PIECE", 100)
    path = tmp_path / "text.txt"
    path.write_text(WORDS + "é" * 300, encoding="utf-8")  # a long line, cut inside characters
    text = "".join(
        model.tokenizer.decode(window) for window in windows_of(model, path, n_window=32)
    )
    assert text == WORDS + "é" * 300
    of_string = np.concatenate([*windows_of(model, WORDS, 32)])
    path.write_text(WORDS, encoding="utf-8")
    np.testing.assert_array_equal(np.concatenate([*windows_of(model, path, 32)]), of_string)
    np.testing.assert_array_equal(of_string, model.tokenizer.encode(WORDS, add_special=False))


def test_each_window_of_a_string_starts_with_bos_where_texts_do(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "add_bos", True)
    monkeypatch.setattr(model.tokenizer, "bos_id", 7)
    windows = [*windows_of(model, WORDS[:400], 16)]
    assert len(windows) > 3 and all(w[0] == 7 and len(w) <= 16 for w in windows)
    ids = np.concatenate([w[1:] for w in windows])
    np.testing.assert_array_equal(ids, model.tokenizer.encode(WORDS[:400], add_special=False))


@pytest.mark.quick
def test_ids_are_cut_as_they_are(model):
    windows = [w.tolist() for w in windows_of(model, range(10), 4)]
    assert windows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_activations_are_those_of_a_trace_with_what_traces_change(model):
    windows = [*windows_of(model, WORDS[:600], 24)]
    with model.trace(scale={"blk.0.ffn_out": 0.0}):
        found = [*activations_of(model, windows, "blk.*.out")]
        for ids, arrays in found:
            with model.trace("blk.*.out") as t:
                model.logits(ids)
            assert [*arrays] == t.names
            for name, a in arrays.items():
                np.testing.assert_allclose(a, t[name], rtol=1e-5, atol=1e-5)
    ((_, plain),) = activations_of(model, windows[:1], "blk.1.out")
    assert np.abs(plain["blk.1.out"] - found[0][1]["blk.1.out"]).max() > 0.1


@pytest.mark.parametrize("name", ["mamba-Q4_K_M", "lfm2-Q4_K_M", "llama-Q8_0"])
def test_texts_of_any_length_share_a_pass_in_every_kind_of_model(name):
    golden = pyggml.load(GOLDEN / f"{name}.gguf")
    texts = [np.arange(n) + n for n in (3, 9, 5)]
    last = f"blk.{golden.config.n_layer - 1}.out"
    read = [*activations_of(golden, texts, last)]
    exact = pyggml.load(GOLDEN / f"{name}.gguf", compute="f32")
    for ids, (found, arrays) in zip(texts, read, strict=True):
        with exact.trace(last) as t:
            exact.logits(ids)
        np.testing.assert_array_equal(found, ids)
        np.testing.assert_allclose(arrays[last], t[last], rtol=1e-4, atol=1e-4)


def test_rows_leave_out_the_first_token_of_each_window(model):
    rows = activation_rows(model, WORDS, "blk.0.out", "blk.1.q", n_rows=50, n_window=16)
    by_hand = [a["blk.0.out"][1:] for _, a in activations_of(
        model, [*windows_of(model, WORDS, 16)][:4], "blk.0.out")]  # fmt: skip
    np.testing.assert_array_equal(rows["blk.0.out"], np.concatenate(by_hand)[:50])
    assert rows["blk.1.q"].shape[0] == 50 and rows["blk.1.q"].ndim == 2
    with pytest.raises(DataError, match=r"has \d+ rows of activations, wanted 9"):
        activation_rows(model, "To be", "blk.0.out", n_rows=9)


def test_what_cannot_be_read_is_named(model, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe")
    for text, said in [
        (tmp_path / "none.txt", "none.txt: cannot be read"),
        (tmp_path, "it is a folder, wanted a file"),
        (bad, "bad.txt: is no text in UTF-8"),
        ([1 << 30], "ids from"),
    ]:
        with pytest.raises(DataError, match=said):
            [*windows_of(model, text)]
    with pytest.raises(ConfigError, match="n_window is 1, wanted 2 to the 512"):
        next(windows_of(model, WORDS, 1))
    with pytest.raises(DataError, match="a text of 513 tokens, wanted at most the 512"):
        next(activations_of(model, [np.zeros(513, int)], "blk.0.out"))
    with pytest.raises(ConfigError, match="no activation is named blk.9.out"):
        next(activations_of(model, [np.arange(4)], "blk.9.out"))
    with (
        pytest.raises(NotFiniteError, match="blk.1.out holds NaN"),
        model.trace(scale={"blk.0.ffn_out": 3e38}),
    ):
        next(activations_of(model, [np.arange(4)], "blk.1.out"))
