"""`pyggml eval` on questions as benchmarks have them."""

import json
import re

import pytest
from extras import need

from pyggml.cli.commands.eval.files import File
from pyggml.gguf.fields import brief
from pyggml.lora.config import EvalConfig


@pytest.fixture
def lines(tmp_path):
    """(name, rows) -> a file of JSON Lines."""

    def write(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def subjects(lines):
    rows = [
        {"question": f"the {w}", "choices": ["path", "to"], "answer": i % 2, "subject": s}
        for i, (w, s) in enumerate([("a", "law"), ("b", "art"), ("c", "law"), ("d", "law")])
    ]
    return lines("mmlu.jsonl", rows)


def test_each_category_has_a_row_below_its_model(pyggml, tiny, subjects):
    ended = pyggml("eval", "-m", tiny, "-f", subjects)
    assert ended.code == 0, ended.err
    rows = [re.split(r"  +", line.strip())[0] for line in ended.out.splitlines()]
    at = rows.index("tiny.gguf")
    assert rows[at + 1 : at + 3] == ["art (1)", "law (3)"]
    told = json.loads(pyggml("eval", "-m", tiny, "-f", subjects, "--json").out)
    (model,) = told["files"][0]["models"]
    kinds = model["categories"]
    assert kinds.keys() == {"art", "law"}
    right = 3 * kinds["law"]["acc"]["value"] + kinds["art"]["acc"]["value"]
    assert right / 4 == pytest.approx(model["acc"]["value"])


def test_one_category_is_no_row_of_its_own(pyggml, tiny, lines):
    rows = [{"question": "a", "choices": ["b", "c"], "answer": 0, "subject": "law"}] * 2
    assert "law" not in pyggml("eval", "-m", tiny, "-f", lines("q.jsonl", rows)).out


def test_letters_and_examples_change_what_is_asked(pyggml, tiny, subjects, lines):
    dev = lines("dev.jsonl", [
        {"question": "the e", "choices": ["to", "path"], "answer": 1, "subject": s}
        for s in ("law", "art")
    ])  # fmt: skip
    words = ("eval", "-m", tiny, "-f", subjects)
    put = (
        ({"letters": True}, "the a\nA. path\nB. to"),
        ({"ask": "Q: {}\nA:"}, "Q: the a\nA:"),
        ({"shots": 1, "shots_file": str(dev)}, "the e path\n\nthe a"),
        (
            {"letters": True, "ask": "{}\n:", "shots": 1, "shots_file": str(dev)},
            "the e\nA. to\nB. path\n: B\n\nthe a\nA. path\nB. to\n:",
        ),
    )
    for how, prompt in put:
        assert File.read(subjects, EvalConfig(**how)).rows[0].prompt == prompt
    ended = pyggml(*words, "--letters", "--ask", r"{}\n:", "--shots", 1, "--shots-file", dev)
    assert ended.code == 0 and ended.out != pyggml(*words).out
    few = pyggml(*words, "--shots", 2)
    assert few.code == 2
    assert "line 1 has 1 other questions" not in few.err
    assert "line 2 has 0 other questions of the category art to stand before it" in few.err


@pytest.fixture
def problems(lines):
    return lines("gsm.jsonl", [
        {"question": f"the path to {i}", "answer": f"so it is.\n#### {i}"} for i in range(3)
    ])  # fmt: skip


def test_written_answers_are_found_by_an_expression(pyggml, tiny, problems):
    words = ("eval", "-m", tiny, "-f", problems, "--answer-tokens", 8)
    some = pyggml(*words, "--match", "(?s).", "--json")
    assert some.code == 0, some.err
    (file,) = json.loads(some.out)["files"]
    assert (file["kind"], file["n"], "chance" in file) == ("written", 3, False)
    (model,) = file["models"]
    assert len(model["answers"]) == 3 and all(isinstance(a["text"], str) for a in model["answers"])
    table = pyggml(*words, "--match", "####")
    assert "3 questions, answers written" in table.out and "match" in table.out
    assert "by chance" not in table.out


def test_a_model_that_writes_the_answer_is_right(pyggml, tiny, lines):
    """Of what it writes itself, a row is made."""
    first = lines("a.jsonl", [{"question": "the path to", "answer": "x"}])
    words = ("eval", "-m", tiny, "--answer-tokens", 6, "--match", r"(?s)(\S)", "--json")
    said = json.loads(pyggml(*words, "-f", first).out)["files"][0]["models"][0]["answers"][0]
    letter = re.search(r"\S", said["text"])
    if letter is None:
        pytest.fail(f"the model writes white space alone: {brief(said['text'])}")
    right = lines("b.jsonl", [{"question": "the path to", "answer": letter[0]}])
    (model,) = json.loads(pyggml(*words, "-f", right).out)["files"][0]["models"]
    assert model["match"]["value"] == 1


def test_two_models_are_compared_by_what_they_write(pyggml, tiny, problems):
    ended = pyggml("eval", "-m", tiny, "-f", problems, "--match", "x", "--answer-tokens", 4,
                   "--compare", tiny)  # fmt: skip
    assert ended.code == 0, ended.err
    assert "won, lost" in ended.out and "0, 0" in ended.out


def test_only_questions_have_answers_to_be_written(pyggml, tiny, lines):
    chats = lines("texts.jsonl", [{"text": "the path"}])
    ended = pyggml("eval", "-m", tiny, "-f", chats, "--match", "x")
    assert ended.code == 2
    assert "--match wants questions with their answers: " in ended.err
    assert ended.err.endswith("line 1 is none\n")


def test_parquet_as_the_hub_has_it(pyggml, tiny, tmp_path):
    pyarrow = need("pyarrow")
    parquet = need("pyarrow.parquet")
    choices = {"text": ["path", "to"], "label": ["A", "B"]}
    rows = [{"id": "1", "question": "the", "choices": choices, "answerKey": "B"}]
    path = tmp_path / "arc.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    ended = pyggml("eval", "-m", tiny, "-f", path)
    assert ended.code == 0 and "1 question of 2 choices" in ended.out, ended.err


@pytest.mark.quick
def test_what_does_nothing_is_refused(pyggml, tiny, problems):
    words = ("eval", "-m", tiny, "-f", problems)
    assert "--stop does nothing without match" in pyggml(*words, "--stop", "x").err
    assert "--match is '(', wanted a regular expression" in pyggml(*words, "--match", "(").err
