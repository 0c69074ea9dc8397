"""Questions: read, encoded and answered as llama.cpp and lm-evaluation-harness do.

tests/golden/evaluation holds what these programs made of the same questions with the same model.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.chat import find_template
from pyggml.cli import demo
from pyggml.errors import DataError
from pyggml.look.intervals import proportion
from pyggml.lora.data import QuestionRow, RowPlace, Schema, read_rows
from pyggml.lora.evaluate import QuestionFormat, choose, encode_questions

GOLDEN = Path(__file__).parents[2] / "golden/evaluation"
QUESTIONS = Schema("question")


@pytest.fixture(scope="module")
def scores():
    return json.loads((GOLDEN / "scores.json").read_text())


@pytest.fixture(scope="module")
def model():
    return pyggml.load(demo.BASE, compute="f32")


@pytest.fixture(scope="module")
def rows():
    return read_rows(GOLDEN / "questions.jsonl", QUESTIONS)[1]


@pytest.fixture(scope="module")
def answers(model, rows):
    return choose(model, encode_questions(rows, model.tokenizer, QuestionFormat()))


def row(prompt, *choices, answer=0):
    return QuestionRow(RowPlace("q.jsonl", "line", 3), prompt, choices, answer)


def asked(model, *rows, **asking):
    return encode_questions(rows, model.tokenizer, QuestionFormat(**asking))


# -- against the programs -----------------------------------------------------------------------


def test_every_log_probability_is_the_harness_s(answers, scores):
    theirs = scores["harness"]["log_probs"]
    assert sum(map(len, theirs)) == 188
    for mine, wanted in zip(answers.log_probs, theirs, strict=True):
        assert mine == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("measure", ["acc", "acc_norm", "acc_bytes"])
def test_every_answer_is_the_harness_s(answers, scores, measure):
    assert answers.right[measure].astype(int).tolist() == scores["harness"][measure]


def test_every_answer_is_llama_cpp_s(answers, scores):
    """--multiple-choice of all questions; --hellaswag of those with four endings, whose share and
    interval it prints."""
    right = answers.right["acc_token"]
    assert right.astype(int).tolist() == scores["llama"]["right"]
    found = proportion(int(right[:40].sum()), 40)
    wanted = [x / 100 for x in scores["llama"]["hellaswag"]]
    assert [found.value, found.low, found.high] == pytest.approx(wanted, abs=1e-6)


def test_the_measures_differ_on_these_questions(answers):
    kinds = {tuple(answers.right[name]) for name in ("acc", "acc_norm", "acc_token")}
    assert len(kinds) == 3


# -- borders ------------------------------------------------------------------------------------


def test_white_space_before_a_choice_is_the_harness_s_to_score(model):
    (question,) = asked(model, row("Is it so? \n", "yes", "no"))
    (whole, own), text = (question.choices[0].whole, question.choices[0].own), "Is it so? \n yes"
    assert whole.ids == own.ids == tuple(model.tokenizer.encode(text))
    assert model.tokenizer.decode(whole.ids[whole.first :]) == " \n yes"
    assert model.tokenizer.decode(own.ids[own.first :]) == " yes"


def test_what_choices_begin_with_is_llama_cpp_s_to_leave_out(model):
    (question,) = asked(model, row("I have", "not the king.", "not the queen."))
    for choice in question.choices:
        whole, own = (model.tokenizer.decode(c.ids[c.first :]) for c in (choice.whole, choice.own))
        assert whole.startswith(" not the ") and whole.endswith(own) and "not" not in own


def test_a_choice_that_another_begins_with_keeps_a_token(model):
    (question,) = asked(model, row("I have", "not", "not the queen."))
    own = question.choices[0].own
    assert len(own.ids) - own.first == 1


def test_a_template_asks_and_the_choice_answers(model):
    template = find_template(model.tokenizer, "alpaca")
    (question,) = asked(model, row("Is it so?", "yes", "no"), template=template)
    prompt = template.render([{"role": "user", "content": "Is it so?"}], add_generation_prompt=True)
    assert model.tokenizer.decode(question.choices[1].whole.ids, special=True) == prompt + "no"


def test_the_beginning_of_a_long_question_may_be_cut(model):
    long = row("Once upon a time there was a king who had a", "son", "daughter")
    (whole,), (cut,) = asked(model, long), asked(model, long, most=9, cut=True)
    assert len(cut.choices[1].whole.read) == 9 > len(cut.choices[0].whole.read)
    for a, b in zip(whole.choices, cut.choices, strict=True):
        n = len(a.whole.ids) - len(b.whole.ids)
        assert b.whole.ids == a.whole.ids[n:] and b.own.ids == a.own.ids[n:]
        assert (b.whole.first, b.own.first) == (a.whole.first - n, a.own.first - n)
    with pytest.raises(DataError, match=r"q.jsonl: line 3 has \d+ tokens to be read, wanted at m"):
        asked(model, long, most=9)
    with pytest.raises(DataError, match="line 3 has a choice of 4 tokens, wanted fewer than the 2"):
        asked(model, long, most=2, cut=True)


# -- rows ---------------------------------------------------------------------------------------


def read(tmp_path, *records, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [(r.prompt, r.choices, r.answer) for r in read_rows(path, QUESTIONS)[1]]


def test_hellaswag_is_put_together_as_the_harness_does(tmp_path):
    record = {
        "ctx": "A man sits. he", "ctx_a": "A man sits.", "ctx_b": "he", "activity_label": "Sitting",
        "endings": ["stands [step] up.", "eats  soup.", "is [title] a", "x"], "label": "2",
    }  # fmt: skip
    endings = ("stands  up.".replace("  ", " "), "eats soup.", "is.  a".replace("  ", " "), "x")
    assert read(tmp_path, record) == [("Sitting: A man sits. He", endings, 2)]
    plain = {"ctx": "A [man] sits.", "endings": ["a", "b"], "label": 1}
    assert read(tmp_path, plain) == [("A [man] sits.", ("a", "b"), 1)]


def test_pubmedqa_is_read_as_its_authors_wrote_it(tmp_path):
    path = tmp_path / "labeled.json"
    one = {"QUESTION": "Is it?", "CONTEXTS": ["First.", "Second."], "final_decision": "maybe"}
    path.write_text(json.dumps({"123": one, "124": one | {"final_decision": "yes"}}))
    _, found = read_rows(path, QUESTIONS)
    prompt = "Abstract: First.\nSecond.\nQuestion: Is it?\nAnswer:"
    assert [(r.prompt, r.answer) for r in found] == [(prompt, 2), (prompt, 0)]
    assert [str(r.place) for r in found] == ["item 1", "item 2"]


@pytest.mark.parametrize(
    "answer, wanted", [(1, 1), ("B", 1), ("b two", 1), ("1", 1), ("3", 2), ("0", 0)]
)
def test_an_answer_may_be_a_choice_a_number_or_a_letter(tmp_path, answer, wanted):
    record = {"question": "Q", "context": "C", "choices": ["a", "b two", "3"], "answer": answer}
    assert read(tmp_path, record) == [("C\nQ", ("a", "b two", "3"), wanted)]


def test_arc_s_labels_are_its_own(tmp_path):
    choices = {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}
    record = {"question": "Q", "choices": choices, "answerKey": "2"}
    assert read(tmp_path, record) == [("Q", ("x", "y", "z"), 1)]


NUMBERS = '"[""1"", ""2"", ""3"", ""4""]"'


def table(tmp_path, *lines):
    path = tmp_path / "rows.csv"
    path.write_text("question,choices,answer\n" + "".join(f"Q,{line}\n" for line in lines))
    return [row.answer for row in read_rows(path, QUESTIONS)[1]]


def test_a_file_has_one_reading_of_its_answers(tmp_path):
    """By the type of a column and by the rows that can be read in one way alone."""
    words = '"[""a"", ""b"", ""c""]"'
    assert table(tmp_path, f"{NUMBERS},2", f"{NUMBERS},4") == [1, 3], "4 is no number from 0"
    assert table(tmp_path, f"{NUMBERS},2", f"{NUMBERS},0") == [2, 0], "0 is no choice"
    assert table(tmp_path, f"{NUMBERS},2", f"{words},1") == [2, 1]
    assert table(tmp_path, f"{NUMBERS},B", f"{words},c") == [1, 2]
    record = {"question": "Q", "choices": ["1", "2", "3", "4"], "answer": 2}
    assert read(tmp_path, record) == [("Q", ("1", "2", "3", "4"), 2)], "a number of JSON"
    both = "read as a number from 0, '3' or as the text of a choice, '2', and no other row says"
    for others in ((), (f"{NUMBERS},B",), (f"{NUMBERS},0", f"{NUMBERS},4")):
        with pytest.raises(DataError, match=f"record 1 .*{both}"):
            table(tmp_path, f"{NUMBERS},2", *others)


@pytest.mark.parametrize(
    "change",
    [
        {"options": ["x", "y"], "answer": "B", "answer_index": 1, "category": "c"},
        {"options": {"A": "x", "B": "y"}, "answer": "y", "answer_idx": "B"},
        {"A": "x", "B": "y", "C": "", "answer": "B"},
        {"options": ["x", "y"], "answer": "B", "article": "T"},
    ],
)
def test_choices_as_benchmarks_have_them(tmp_path, change):
    asked = "T\nQ" if "article" in change else "Q"
    assert read(tmp_path, {"question": "Q"} | change) == [(asked, ("x", "y"), 1)]
    for wrong, said in (
        ({"answer": "A", "answer_index": 1}, '"answer" and "answer_index" are two choices'),
        ({"A": "x", "B": "", "C": "y"}, '"B" is empty, before one that is not'),
    ):
        if wrong.keys() & change.keys() - {"answer"}:
            with pytest.raises(DataError, match=said):
                read(tmp_path, {"question": "Q"} | change | wrong)
    with pytest.raises(DataError, match="which `pyggml eval` asks"):
        read_rows(tmp_path / "rows.jsonl", Schema("training"))


def test_choices_of_a_table_are_a_list_in_json(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,choices,answer\nQ,"[""a"", ""b""]",b\n')
    (found,) = read_rows(path, QUESTIONS)[1]
    assert (found.prompt, found.choices, found.answer) == ("Q", ("a", "b"), 1)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"choices": ["a"]}, '"choices" has 1 choices, wanted 2 to 100'),
        ({"choices": ["a", 5]}, '"choices" is a number'),
        ({"choices": "a or b"}, '"choices" is no JSON'),
        ({"answer": "c"}, "\"answer\" is 'c', wanted one of the 2 choices"),
        ({"answer": 2}, "\"answer\" is '2', wanted one of the 2 choices"),
        ({"answer": True}, '"answer" is a boolean, wanted a choice'),
        ({"question": " "}, '"question" is empty'),
    ],
)
def test_a_faulty_question_is_told(tmp_path, change, said):
    with pytest.raises(DataError, match="rows.jsonl: line 2 is an object whose ") as told:
        good = {"question": "Q", "choices": ["a", "b"], "answer": 0}
        read(tmp_path, good, good | change)
    assert said in str(told.value)


# -- live ---------------------------------------------------------------------------------------


@pytest.mark.interop
def test_llama_cpp_s_logits_give_these_log_probabilities(model, rows, answers):
    from peers.trial import llama_cpp_logits

    questions = encode_questions(rows, model.tokenizer, QuestionFormat())
    for question, mine in list(zip(questions, answers.log_probs, strict=True))[::5]:
        for choice, value in zip(question.choices, mine, strict=True):
            ids, first = choice.whole.ids, choice.whole.first
            logits = llama_cpp_logits(demo.BASE, np.array(ids)).astype(np.float64)[first - 1 : -1]
            found = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            theirs = found[np.arange(len(logits)), ids[first:]].sum()
            assert value == pytest.approx(theirs, abs=0.5, rel=0.01)  # it rounds activations
