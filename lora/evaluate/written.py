"""Answers that a model writes → which are right: what a regular expression finds in the text.

As lm-evaluation-harness has GSM8K: the likeliest tokens up to a stop text; found and wanted are
compared without case, $, thousands' commas and a full stop at the end. The cache keeps what a
prompt begins with as the one before it: examples are read once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.generation import Sampling, Session
from pyggml.generation.completion import Completion
from pyggml.generation.drafts import n_common
from pyggml.lora.config import EvalConfig
from pyggml.lora.data.reading.files import map_rows
from pyggml.lora.data.records.rows import QuestionRow
from pyggml.lora.evaluate.asking import Exercise
from pyggml.lora.evaluate.choices import Answers
from pyggml.lora.evaluate.passes import Hear, Ids, unheard
from pyggml.lora.evaluate.questions import QuestionFormat, prompt_ids
from pyggml.model import Model

_IGNORED = re.compile(r"[,$]|\.$")


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds an answer in a text: the expression's first group, or all that it fits."""

    pattern: str
    last: bool = False

    def find(self, text: str) -> str | None:
        """None where there is none."""
        matches = re.findall(self.pattern, text)
        if not matches:
            return None
        one = matches[-1 if self.last else 0]
        return one if isinstance(one, str) else next((part for part in one if part), "")

    def right_answer(self, row: Exercise) -> str:
        """That of a row: of a written one what is found in it, else all of it."""
        if isinstance(row, QuestionRow):
            return row.choices[row.answer]
        part = self.find(row.completion)
        return row.completion if part is None else part

    def is_right(self, row: Exercise, text: str) -> bool:
        """Whether a text has the row's answer."""
        answer = self.find(text)
        return answer is not None and _plain(answer) == _plain(self.right_answer(row))


def _plain(answer: str) -> str:
    return _IGNORED.sub("", answer.strip()).strip().lower()


def write_answers(
    model: Model, rows: Sequence[Exercise], config: EvalConfig, report: Hear = unheard
) -> Answers:
    """What a model writes after each prompt, and whether it is right: the measure "match".

    report: after each answer. Raises DataError for prompts that do not fit into the model's context
    with their answer, by place.
    """
    asking, finder = QuestionFormat.of(config, model), Finder(config.match or "", config.match_last)
    most = asking.most - config.answer_tokens
    prompts = map_rows(
        rows, lambda row: _fitting(prompt_ids(row.prompt, model, asking), most, asking)
    )
    how = Sampling(temperature=0, stop=config.stop)
    writer = AnswerWriter(model, max(map(len, prompts)) + config.answer_tokens)
    texts = list[str]()
    for ids in prompts:
        texts.append(writer.write(ids, how, config.answer_tokens))
        report(len(texts), len(prompts))
    right = np.array([finder.is_right(r, t) for r, t in zip(rows, texts, strict=True)], np.bool_)
    empty = [np.empty(0)] * len(rows)
    return Answers(empty, empty, {"match": right}, texts)


def _fitting(ids: Ids, most: int, asking: QuestionFormat) -> Ids:
    """The tokens of a prompt that the model reads, at most so many: the last ones, if any may be
    left out."""
    if len(ids) > most and (not asking.cut or most < 1):
        raise BadValue(
            f"has {len(ids)} tokens, wanted at most {most} before an answer in {asking.most}: "
            "--long cut leaves out the beginning, fewer --answer-tokens or --shots leave room"
        )
    return ids[-most:] if len(ids) > most else ids


class AnswerWriter:
    """Writes one answer after the other. What a prompt begins with as the one before it is read
    once."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        """n_ctx: the most tokens of a prompt and its answer together."""
        self._session = Session(model, n_ctx)
        self._tokens: Ids = ()  # that the session has read

    def write(self, ids: Ids, how: Sampling, n_tokens: int) -> str:
        """The text after a prompt, of n_tokens at most, up to a stop text."""
        n_same = n_common(ids[:-1], self._tokens)
        self._session.truncate(n_same)
        completion = Completion(self._session.model.tokenizer, how, ids, n_tokens)
        text = ""
        if completion.finish is not None:  # no token is wanted
            return text
        for piece in self._session.pieces(completion, ids[n_same:]):
            text += piece.text
            if piece.finish is not None:
                break
        self._tokens = (*ids, *completion.tokens)[: self._session.n_past]
        return text
