"""The report on rows: what is there twice or on both sides, empty or cut; lengths and scripts."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import Corpus, Document, pack
from pyggml.lora.data.report import _nearest, data_report, language_report

from chats import assistant, user, vocabulary

SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers briefly." * 3}


def chat(asked, answer):
    return {"messages": [SYSTEM, user(asked), assistant(answer)]}


@pytest.fixture
def report(tmp_path):
    """Reads rows to train on, and rows held out, and reports on them."""

    def make(rows, held_out=(), what=data_report, **settings):
        paths = [tmp_path / f"{name}.jsonl" for name in ("train", "held_out")]
        for path, some in zip(paths, (rows, held_out), strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in some))
        files = {"val_file": (str(paths[1]),)} if held_out else {"val_split": 0.0}
        settings = {"ctx": 600, "chat_template": "chatml"} | files | settings
        tokenizer = vocabulary()
        corpus = read_corpus(paths[0], tokenizer, DataConfig(**settings))
        return what(corpus, tokenizer)

    return make


def found(made):
    return {finding.what: finding.n for finding in made.findings}


def texts(n, seed=0):
    """n texts of 30 words each that have nothing in common."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"{x:x}" for x in rng.integers(1 << 20, 1 << 24, 30)) for _ in range(n)]


@pytest.mark.quick
def test_rows_without_faults_have_no_findings(report):
    made = report([chat(a, b) for a, b in zip(texts(30), texts(30, 1), strict=True)])
    assert made.findings == () and (made.n_rows, made.n_held_out, made.n_read) == (30, 0, 30)
    assert made.lengths[0] > made.answers[3] >= made.answers[0] > 200
    assert made.scripts == (("Latin", 1.0),)
    assert "repeating an earlier one" in made.absent and "with an empty answer" in made.absent
    assert json.loads(json.dumps(asdict(made)))["n_rows"] == 30


@pytest.mark.quick
def test_rows_that_are_there_twice_are_counted_and_shown(report):
    """A system message that all share makes no row a copy of another."""
    rows = [chat(t, t[:90]) for t in texts(30)]
    near = chat(texts(30)[3] + " and", texts(30)[3][:90])
    made = report(
        [*rows, rows[0], rows[1], near], [rows[5], chat(texts(30)[6][:-4], "end"), *rows[:0]]
    )
    assert found(made) == {
        "repeating an earlier one": 2,
        "nearly repeating an earlier one": 1,
        "held out and trained on too": 1,
        "held out, and nearly the same as one trained on": 1,
    }
    assert rows[0]["messages"][2]["content"].startswith(made.findings[0].examples[0][:20])


@pytest.mark.quick
def test_empty_and_cut_answers_and_rare_scripts(report):
    rows = [{"prompt": t, "completion": t[:40]} for t in texts(40)]
    empty = {"prompt": texts(1, 2)[0], "completion": "</s>"}
    other = {"prompt": "Как дела сегодня утром?", "completion": "Хорошо, спасибо за вопрос."}
    made = report([*rows, empty, other])
    assert found(made) == {"with an empty answer": 1, "in a script that few rows have": 1}
    assert dict(made.scripts)["Cyrillic"] == pytest.approx(1 / 42, abs=1e-3)
    long = {"prompt": texts(1, 3)[0][:20], "completion": texts(1, 3)[0] * 3}
    cut = report([*rows, long], ctx=400, long_chats="truncate")
    assert found(cut) == {"whose answer ends in no token that ends a turn": 1}
    bare = report([{"text": t} for t in texts(10)], end_of_text=False)
    assert found(bare) == {"whose answer ends in no token that ends a turn": 10}


ENGLISH = "The ferry leaves the harbour every morning and comes back before it is dark, number {}."
GERMAN = "Das Schiff verlässt jeden Morgen den Hafen und kommt am Abend wieder zurück, Nummer {}."


@pytest.mark.quick
def test_languages_of_one_script_are_told_apart_by_what_is_learned(report):
    """Not by the system message; a word or code is of no language."""
    rows = [chat(f"? {i}", ENGLISH.format(i)) for i in range(40)]
    made = report([*rows, chat("?", GERMAN), chat("?", "12")], what=language_report)
    assert [code for code, _ in made.shares] == ["en", "de"]
    assert dict(made.shares)["de"] == made.untold == pytest.approx(1 / 42, abs=1e-3)
    (rare,) = made.findings
    assert (rare.what, rare.n) == ("in a language that few rows have", 1)
    even = [chat("?", text.format(i)) for i in range(9) for text in (ENGLISH, GERMAN)]
    assert report(even, what=language_report).findings == ()
    assert report(rows, what=language_report).shares == (("en", 1.0),)


@pytest.mark.quick
def test_examples_end_with_a_whole_character(report):
    rows = [{"text": "я" * 40}] * 2
    (finding,) = report(rows, end_of_text=False, what=data_report).findings[:1]
    assert set(finding.examples[0]) == {"я"}


@pytest.mark.quick
@pytest.mark.parametrize("settings", [{}, {"packing": False}, {"val_split": 0.5}])
def test_a_document_longer_than_a_window_goes_on_and_is_no_cut_answer(report, settings):
    """It ends once, in its last window; parts that begin or end inside a character show none."""
    said = "whose answer ends in no token that ends a turn"
    rows = [
        {"text": f"{i:02} " + "ж" * (150 + i)} for i in range(12)
    ]  # of two bytes, from an odd one on
    made = report(rows, ctx=64, **settings)
    assert said not in found(made)
    shown = [text for finding in made.findings for text in finding.examples]
    assert not any("\ufffd" in text for text in shown)
    bare = report(rows, ctx=64, end_of_text=False, **settings)
    assert found(bare)[said] == 12, "each text once"
    shown = [text for finding in bare.findings for text in finding.examples]
    assert shown and not any("\ufffd" in text for text in shown)
    long = [chat(text, "x" * 400) for text in texts(6)]
    cut = report(long, ctx=500, long_chats="truncate")
    assert found(cut)[said] == 6, "a chat has no next window"


@pytest.mark.quick
def test_the_script_is_that_of_what_is_learned(report):
    """A long question and a template in Latin do not hide answers in another script."""
    rows = [chat(t, "Хорошо, спасибо за вопрос.") for t in texts(3)]
    assert report(rows).scripts == (("Cyrillic", 1.0),)


@pytest.mark.quick
def test_near_duplicates_are_those_that_share_most_of_their_sequences():
    """Held against the share itself, over rows with more and more words exchanged."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1000, 400)
    for n_changed, wanted in ((0, True), (4, True), (120, False)):
        rows = [rng.integers(0, 1000, 400) for _ in range(20)]
        copy = base.copy()
        copy[rng.choice(400, n_changed, replace=False)] += 1000
        near = _nearest([base, *rows, copy])
        assert (near[-1] == 0) is wanted or bool(near[-1] == 0) == wanted
        assert (near[:-1] == np.arange(21)).all()


@pytest.mark.quick
def test_of_many_rows_a_spread_sample_is_looked_at(monkeypatch):
    monkeypatch.setattr("pyggml.lora.data.report.MOST", 50)
    rng = np.random.default_rng(0)
    rows = [Document(rng.integers(6, 200, 9), np.arange(9) > 2) for _ in range(300)]
    made = data_report(
        Corpus(pack(rows, 20, whole=True), pack(rows[:100], 20, whole=True)), vocabulary()
    )
    assert (made.n_rows, made.n_held_out) == (300, 100) and 45 <= made.n_read <= 50
