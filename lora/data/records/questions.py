"""Records of multiple choice → questions, by the names that public sets of them have.

names                                                set
ctx, endings, label [activity_label, ctx_a, ctx_b]   HellaSwag
QUESTION, CONTEXTS, final_decision                   PubMedQA: yes, no or maybe
question, choices, answer [context, category]        any; MMLU, MMLU-Pro and MedQA (options), RACE
question, choices, answerKey                         ARC: choices {"text": [...], "label": [...]}
question, A, B, answer [C, D, …]                     tables with a column for each choice

A question may also be named prompt, choices options, a category subject; MMLU-Pro's cot_content is
the answer with its reasoning. The prompt is what the model reads; nothing is added to it.
HellaSwag's and PubMedQA's are put together as lm-evaluation-harness does, so that scores can be
compared.
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyggml.chat.messages import BadValue, checked_text, kind_of, list_of
from pyggml.lora.data.records.names import CHOICES, CONTEXT, KEY, KEY_AGAIN, LETTERS
from pyggml.lora.data.records.rows import QuestionRow, Row, RowPlace
from pyggml.lora.data.records.shape import Cells, Shape

MOST_CHOICES = 100
Choices = tuple[tuple[str, ...], tuple[str, ...]]  # the texts, and their labels, if they have any
_PUBMEDQA = ("yes", "no", "maybe")
_NUMBER, _TEXT, _LETTER = "a number from 0", "the text of a choice", "a letter"
_STEPS = "A: Let's think step by step."  # with which MMLU-Pro's reasoning begins
_KINDS = ("category", "subject")
_BRACKETS = re.compile(r"\[.*?\]")  # what is left of WikiHow's markup


def _of_choices(place: RowPlace, cells: Cells) -> QuestionRow:
    return _question(place, cells, cells.read("choices", _choices))


def _of_columns(place: RowPlace, cells: Cells) -> QuestionRow:
    texts = tuple(cells.text(letter) for letter in LETTERS if cells.has(letter))
    if not all(map(cells.has, LETTERS[: len(texts)])):
        missing = next(letter for letter in LETTERS if not cells.has(letter))
        raise BadValue(f'is an object whose "{missing}" is empty, before one that is not')
    return _question(place, cells, _checked_choices(texts, LETTERS[: len(texts)]))


def _question(place: RowPlace, cells: Cells, choices: Choices) -> QuestionRow:
    prompt = cells.text("question")
    if cells.has("context"):
        prompt = f"{cells.text('context')}\n{prompt}"
    texts, labels = choices
    readings = cells.read("answer", lambda value: _readings(value, texts, labels))
    if cells.has("answer_index"):
        again = cells.read("answer_index", lambda value: _readings(value, texts, labels))
        readings = {how: i for how, i in readings.items() if i in again.values()}
        if not readings:
            names = f'"{cells.names["answer"]}" and "{cells.names["answer_index"]}"'
            raise BadValue(f"is an object whose {names} are two choices")
    kinds = (cells.get(name) for name in _KINDS)
    kind = next((kind.strip() for kind in kinds if isinstance(kind, str)), "")
    steps = cells.get("cot_content")
    worked = steps.removeprefix(_STEPS).strip() if isinstance(steps, str) else ""
    return replace(_row(place, prompt, texts, readings), category=kind, worked=worked)


def _row(
    place: RowPlace, prompt: str, choices: tuple[str, ...], readings: Mapping[str, int]
) -> QuestionRow:
    return QuestionRow(place, prompt, choices, next(iter(readings.values())), readings=readings)


def _of_endings(place: RowPlace, cells: Cells) -> QuestionRow:
    whole = all(map(cells.has, ("activity_label", "ctx_a", "ctx_b")))
    prompt = cells.text("ctx")
    if whole:
        prompt = f"{cells.text('ctx_a')} {cells.text('ctx_b').capitalize()}"
    endings, labels = cells.read("endings", _choices)
    readings = cells.read("label", lambda value: _readings(value, endings, labels))
    if cells.has("activity_label"):
        prompt = _without_markup(f"{cells.text('activity_label')}: {prompt}")
        endings = tuple(map(_without_markup, endings))
    return _row(place, prompt, endings, readings)


def _without_markup(text: str) -> str:
    return _BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _of_abstract(place: RowPlace, cells: Cells) -> QuestionRow:
    abstract = cells.read("CONTEXTS", lambda value: "\n".join(map(_text, list_of(value))))
    prompt = f"Abstract: {abstract}\nQuestion: {cells.text('QUESTION')}\nAnswer:"
    readings = cells.read("final_decision", lambda value: _readings(value, _PUBMEDQA, ()))
    return _row(place, prompt, _PUBMEDQA, readings)


def _text(value: Any) -> str:
    return checked_text(value, may_be_empty=False)


def _choices(value: Any) -> Choices:
    """A list of texts; or an object of two lists, as ARC has it, or of texts by their labels."""
    if not isinstance(value, dict):
        return _checked_choices(list_of(value), ())
    if "text" in value:
        return _checked_choices(list_of(value["text"]), list_of(value.get("label")))
    return _checked_choices([*value.values()], [*value])


def _checked_choices(texts: Sequence[Any], labels: Sequence[Any]) -> Choices:
    choices = tuple(map(_text, texts))
    if not 2 <= len(choices) <= MOST_CHOICES:
        raise BadValue(f"has {len(choices)} choices, wanted 2 to {MOST_CHOICES}")
    if labels and len(labels) != len(choices):
        raise BadValue(f"has {len(choices)} texts and {len(labels)} labels")
    return choices, tuple(map(_text, labels))


# -- answers ------------------------------------------------------------------------------------


def _readings(value: Any, choices: tuple[str, ...], labels: tuple[str, ...]) -> dict[str, int]:
    """What an answer may mean, and the number of the choice that it is then, from 0.

    A label that choices have is no other thing. Else a number of JSON or parquet counts from 0, and
    a text is a choice, such a number, or a letter: whatever of these fits.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not isinstance(value, str):
        raise BadValue(f"is a {kind_of(value)}, wanted a choice, its number from 0, or its letter")
    word = str(value)
    if word in labels:
        return {"a label": labels.index(word)}
    numbers = tuple(str(i) for i in range(len(choices)))
    ways = {
        _NUMBER: numbers,
        _TEXT: choices,
        _LETTER: tuple(string.ascii_uppercase[: len(choices)]),
    }
    ways = {_NUMBER: numbers} if is_number else ways
    readings = {how: names.index(word) for how, names in ways.items() if word in names}
    if not readings:
        raise BadValue(
            f"is {word[:40]!r}, wanted one of the {len(choices)} choices, its number from 0, or "
            "its letter"
        )
    return readings


def settle(rows: Sequence[Row]) -> list[tuple[Row, BadValue | None]]:
    """Rows, of which questions have the answer that all rows of their file allow; and a fault where
    there are two.

    Answers that can be read in one way alone tell how the others are read.
    """
    questions = [row for row in rows if isinstance(row, QuestionRow)]
    certain = {how for row in questions if len(row.readings) == 1 for how in row.readings}
    return [
        _settle_one(row, certain) if isinstance(row, QuestionRow) else (row, None) for row in rows
    ]


def _settle_one(row: QuestionRow, certain: set[str]) -> tuple[Row, BadValue | None]:
    readings = {how: i for how, i in row.readings.items() if how in certain} or row.readings
    if len({*readings.values()}) < 2:
        return replace(row, answer=next(iter(readings.values()), row.answer), readings={}), None
    ways = " or as ".join(f"{how}, {row.choices[i][:40]!r}" for how, i in readings.items())
    fault = f"has an answer that can be read as {ways}, and no other row says which: write letters"
    return row, BadValue(fault, says_all=True)


_ASKS = ("question", "prompt")
_ABOUT = (CONTEXT, KEY_AGAIN, ("cot_content",), *((name,) for name in _KINDS))
QUESTION_SHAPES = (
    Shape(
        (("ctx",), ("endings",), ("label",)),
        _of_endings,
        (("activity_label",), ("ctx_a",), ("ctx_b",)),
    ),
    Shape((("QUESTION",), ("CONTEXTS",), ("final_decision",)), _of_abstract),
    Shape((_ASKS, CHOICES, KEY), _of_choices, _ABOUT),
    Shape(
        (_ASKS, ("A",), ("B",), KEY), _of_columns, (*((letter,) for letter in LETTERS[2:]), *_ABOUT)
    ),
)
