"""Records of multiple choice → questions, by the names that public sets of them have.

names                                              set
ctx, endings, label [activity_label, ctx_a, ctx_b]   HellaSwag
QUESTION, CONTEXTS, final_decision                 PubMedQA: yes, no or maybe
question, choices, answer [context, subject, category]   any; MMLU
question, options, answer [category, cot_content]  MMLU-Pro
question, choices, answerKey                       ARC: choices are {"text": [...], "label": [...]}
prompt, choices, answer                            any

The prompt is what the model reads; nothing is added to it. HellaSwag's and PubMedQA's are put
together as lm-evaluation-harness does, so that scores can be compared.
"""

import re
from typing import Any

from pyggml.lora.data.messages import checked_text, kind_of, list_of
from pyggml.lora.data.rows import BadRow, Place, QuestionRow
from pyggml.lora.data.shapes import Record, Shape, read_text, read_value

MOST_CHOICES = 100
_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CATEGORIES = ("category", "subject")
_STEPS = "A: Let's think step by step."  # with which MMLU-Pro's reasoning begins
_PUBMEDQA = ("yes", "no", "maybe")
_BRACKETS = re.compile(r"\[.*?\]")  # what is left of WikiHow's markup


def _of_choices(place: Place, record: Record) -> QuestionRow:
    name = "prompt" if "prompt" in record else "question"
    prompt = read_text(record, name)
    if name == "question" and record.get("context"):
        prompt = f"{read_text(record, 'context')}\n{prompt}"
    name = "choices" if "choices" in record else "options"
    choices, labels = read_value(record, name, _choices)
    key = "answerKey" if "answerKey" in record else "answer"
    answer = read_value(record, key, lambda value: _answer(value, choices, labels))
    kind = next((record[name] for name in _CATEGORIES if isinstance(record.get(name), str)), "")
    worked = record.get("cot_content")
    worked = worked.removeprefix(_STEPS).strip() if isinstance(worked, str) else ""
    return QuestionRow(place, prompt, choices, answer, kind.strip(), worked)


def _of_endings(place: Place, record: Record) -> QuestionRow:
    whole = all(record.get(name) for name in ("activity_label", "ctx_a", "ctx_b"))
    begun = read_text(record, "ctx")
    if whole:
        begun = f"{read_text(record, 'ctx_a')} {read_text(record, 'ctx_b').capitalize()}"
    endings, labels = read_value(record, "endings", _choices)
    answer = read_value(record, "label", lambda value: _answer(value, endings, labels))
    if record.get("activity_label"):
        begun = _without_markup(f"{read_text(record, 'activity_label')}: {begun}")
        endings = tuple(map(_without_markup, endings))
    return QuestionRow(place, begun, endings, answer)


def _without_markup(text: str) -> str:
    return _BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _of_abstract(place: Place, record: Record) -> QuestionRow:
    contexts = read_value(record, "CONTEXTS", list_of)
    abstract = "\n".join(read_value({"CONTEXTS": c}, "CONTEXTS", _text) for c in contexts)
    prompt = f"Abstract: {abstract}\nQuestion: {read_text(record, 'QUESTION')}\nAnswer:"
    answer = read_value(record, "final_decision", lambda value: _answer(value, _PUBMEDQA, ()))
    return QuestionRow(place, prompt, _PUBMEDQA, answer)


def _text(value: Any) -> str:
    return checked_text(value, may_be_empty=False)


def _choices(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The choices, and their labels; none if they have none."""
    labels: tuple[str, ...] = ()
    if isinstance(value, dict):
        labels = tuple(map(_text, list_of(value.get("label"))))
        value = value.get("text")
    choices = tuple(map(_text, list_of(value)))
    if not 2 <= len(choices) <= MOST_CHOICES:
        raise BadRow(f"has {len(choices)} choices, wanted 2 to {MOST_CHOICES}")
    if labels and len(labels) != len(choices):
        raise BadRow(f"has {len(choices)} texts and {len(labels)} labels")
    return choices, labels


def _answer(value: Any, choices: tuple[str, ...], labels: tuple[str, ...]) -> int:
    """The number of the right choice, from 0, of whatever the record has for it.

    A number is one of `labels`, else counted from 0; a text is a label, a choice, a number or a
    letter, the first that fits.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not isinstance(value, str):
        raise BadRow(f"is a {kind_of(value)}, wanted a choice, its number from 0, or its letter")
    word = str(value)
    numbers = [str(i) for i in range(len(choices))]
    for names in (labels, () if is_number else choices, numbers, _LETTERS[: len(choices)]):
        if word in names:
            return list(names).index(word)
    raise BadRow(
        f"is {word[:40]!r}, wanted one of the {len(choices)} choices, its number from 0, or its "
        "letter"
    )


QUESTION_SHAPES = (
    Shape(("ctx", "endings", "label"), _of_endings, ("activity_label", "ctx_a", "ctx_b")),
    Shape(("QUESTION", "CONTEXTS", "final_decision"), _of_abstract),
    Shape(("question", "choices", "answer"), _of_choices, ("context", *_CATEGORIES)),
    Shape(("question", "choices", "answerKey"), _of_choices, _CATEGORIES),
    Shape(("question", "options", "answer"), _of_choices, ("cot_content", *_CATEGORIES)),
    Shape(("prompt", "choices", "answer"), _of_choices, _CATEGORIES),
)
