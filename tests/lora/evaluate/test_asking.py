"""Questions as benchmarks have them: shapes, categories, letters, examples, written answers."""

import json

import pytest

import pyggml
from pyggml.cli import demo
from pyggml.errors import ConfigError, DataError
from pyggml.generation import Sampling
from pyggml.generation.completion import complete
from pyggml.lora.config import EvalConfig
from pyggml.lora.data import CompletionRow, QuestionRow, RowPlace, Schema, TextRow, read_rows
from pyggml.lora.evaluate import Asking, Finder, write_answers

pytestmark = pytest.mark.quick
PLACE = RowPlace("q.jsonl", "line", 1)

# One row of each set as the hub has it.
SETS = {
    "MMLU": (
        {"question": "Find.", "subject": "algebra", "choices": ["0", "4", "2", "6"], "answer": 1},
        ("Find.", ("0", "4", "2", "6"), 1, "algebra", ""),
    ),
    "MMLU-Pro": (
        {
            "question_id": 70, "question": "Typical?", "options": ["a b", "c", "d", "e f", "g"],
            "answer": "D", "answer_index": 3, "category": "business", "src": "ori",
            "cot_content": "A: Let's think step by step. So. The answer is (D).",
        },
        ("Typical?", ("a b", "c", "d", "e f", "g"), 3, "business", "So. The answer is (D)."),
    ),
    "ARC": (
        {
            "id": "M_1", "question": "Why?", "answerKey": "3",
            "choices": {"text": ["it", "so", "as"], "label": ["1", "2", "3"]},
        },
        ("Why?", ("it", "so", "as"), 2, "", ""),
    ),
    "HellaSwag": (
        {
            "ind": 4, "activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he",
            "ctx": "A man sits. he", "endings": ["falls.", "[step] sings."], "label": "1",
            "split": "val", "source_id": "x",
        },
        ("Roof: A man sits. He", ("falls.", " sings."), 1, "", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_the_shapes_of_the_hub(name, tmp_path):
    record, wanted = SETS[name]
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (row,) = read_rows(path, Schema("question"))[1]
    assert (row.prompt, row.choices, row.answer, row.category, row.worked) == wanted


def question(prompt="Q?", category="", answer=0, worked=""):
    return QuestionRow(PLACE, prompt, ("yes", "no"), answer, category, worked)


def asked(rows, shots=None, **how):
    return [row.prompt for row in Asking(**how).rows(rows, shots)]


def test_letters_stand_for_the_choices():
    (row,) = Asking(letters=True, ask="{}\nAnswer:").rows([question(answer=1)])
    assert row.prompt == "Q?\nA. yes\nB. no\nAnswer:"
    assert (row.choices, row.answer) == (("A", "B"), 1)


def test_a_question_stands_in_its_text():
    assert asked([question(), CompletionRow(PLACE, "1+1", "2")], ask="Q: {}\nA:") == [
        *("Q: Q?\nA:", "Q: 1+1\nA:"),
    ]


def test_examples_are_of_the_category_and_never_the_question_itself():
    rows = [question("a", "x"), question("b", "y", 1), question("c", "x", 1), question("d", "y")]
    assert asked(rows, n_shots=1) == ["c no\n\na", "d yes\n\nb", "a yes\n\nc", "b no\n\nd"]


def test_examples_of_a_split_of_their_own_and_worked_ones():
    dev = [question("e", "x", worked="So. (A)"), question("f", "x"), question("g", "y")]
    assert asked([question("a", "x")], dev, n_shots=2, delimiter="\n") == [
        "e\nSo. (A)\n\nf\nyes\n\na"
    ]


def test_examples_without_a_category_are_for_all():
    assert asked([question("a", "x")], [question("e")], n_shots=1) == ["e yes\n\na"]


BAD = [
    ([question("a", "x"), question("b", "y")], {"n_shots": 1},
     DataError, "line 1 has 0 other questions of the category x to stand before it, wanted 1"),
    ([TextRow(PLACE, "a")], {"ask": "Q: {}"}, ConfigError, "none of the questions to be put so"),
    ([CompletionRow(PLACE, "a", "b")], {"letters": True}, ConfigError, "questions with choices"),
    ([QuestionRow(PLACE, "a", ("b",) * 27, 0)], {"letters": True},
     DataError, "has 27 choices, wanted at most 26 for letters"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "how", "kind", "sentence"), BAD, ids=[b[3][:20] for b in BAD])
def test_what_cannot_be_put_is_said(rows, how, kind, sentence):
    with pytest.raises(kind, match=sentence):
        asked(rows, **how)


FAULTS = [
    ({"match": "("}, "match is '(', wanted a regular expression"),
    ({"ask": "no place"}, "ask is 'no place', wanted a text with one {}"),
    ({"stop": ("x",)}, "stop does nothing without match"),
    ({"answer_tokens": 9}, "answer_tokens does nothing without match"),
    ({"shots_file": "dev.jsonl"}, "shots_file does nothing without shots"),
    ({"shots": -1}, "shots is -1, wanted 0 to 100"),
]


@pytest.mark.parametrize(("given", "sentence"), FAULTS, ids=[f[1][:24] for f in FAULTS])
def test_settings_that_do_nothing_or_are_none(given, sentence):
    with pytest.raises(ConfigError) as caught:
        EvalConfig(**given)
    assert sentence in str(caught.value)


# -- answers that are written -------------------------------------------------------------------

GSM8K = r"#### (-?[0-9.,]+)"
FLEXIBLE = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
FOUND = [
    (Finder(GSM8K), "so #### 1,200 and #### 7", "1,200"),
    (Finder(FLEXIBLE, last=True), "so 12 and $1,200.", "$1,200."),
    (Finder(FLEXIBLE, last=True), "it is 7", "7"),
    (Finder(r"answer is \(?([A-J])\)?"), "The answer is (C).", "C"),
    (Finder("[a-z]+"), "It is", "t"),
    (Finder(GSM8K), "none", None),
]


@pytest.mark.parametrize(("finder", "text", "found"), FOUND, ids=[str(f[2]) for f in FOUND])
def test_what_an_expression_finds(finder, text, found):
    assert finder.find(text) == found


def test_right_is_the_number_whatever_its_dress():
    row = CompletionRow(PLACE, "q", "He has 3 * 400 = 1200.\n#### 1,200")
    finder = Finder(FLEXIBLE, last=True)
    assert finder.right_answer(row) == "1,200"
    assert finder.is_right(row, "so he has $1,200.") and finder.is_right(row, "it is 1200")
    assert not finder.is_right(row, "1200 less 1 is 1199") and not finder.is_right(row, "many")
    assert Finder("is ([a-z])").is_right(QuestionRow(PLACE, "q", ("A", "B"), 1), "it is b")


@pytest.fixture(scope="module")
def model():
    return pyggml.load(demo.BASE, compute="f32")


def test_each_answer_is_that_of_its_prompt_alone(model):
    """Though what prompts begin with alike is read once."""
    rows = [
        CompletionRow(PLACE, f"My lord, the king {w}", "x") for w in ("is", "is a", "was", "is")
    ]
    config = EvalConfig(match="([a-z]+)", answer_tokens=8, stop=("\n",))
    told = []
    answers = write_answers(model, rows, config, lambda done, n: told.append((done, n)))
    for row, text in zip(rows, answers.texts, strict=True):
        ids = model.tokenizer.encode(row.prompt)
        how = Sampling(temperature=0, stop=("\n",))
        assert text == "".join(piece.text for piece in complete(model, ids, 8, how))
    assert told == [(i, 4) for i in range(1, 5)]
    assert answers.right["match"].tolist() == [False] * 4


def test_a_prompt_that_leaves_no_room_is_refused_or_cut(model):
    rows = [CompletionRow(PLACE, "the " * 40, "x")]
    config = {"match": "x", "answer_tokens": 8, "ctx": 32}
    with pytest.raises(DataError, match="line 1 has .* tokens, wanted at most 24 before an answer"):
        write_answers(model, rows, EvalConfig(**config))
    assert len(write_answers(model, rows, EvalConfig(**config, long="cut")).texts) == 1
