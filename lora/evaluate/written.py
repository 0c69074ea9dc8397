"""Answers that a model writes → which are right: what a regular expression finds in the text.

As lm-evaluation-harness has GSM8K: the likeliest tokens up to a stop text; found and wanted are
compared without case, $, thousands' commas and a full stop at the end. The cache keeps what a
prompt begins with as the one before it: examples are read once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from pyggml.generation import Sampling, Session
from pyggml.generation.completion import Completion
from pyggml.lora.config import EvalConfig
from pyggml.lora.data.files import map_rows
from pyggml.lora.data.rows import BadRow, QuestionRow
from pyggml.lora.evaluate.asking import Asked
from pyggml.lora.evaluate.choices import Answers
from pyggml.lora.evaluate.passes import Ids
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
        found = re.findall(self.pattern, text)
        if not found:
            return None
        one = found[-1 if self.last else 0]
        return one if isinstance(one, str) else next((part for part in one if part), "")

    def wanted(self, row: Asked) -> str:
        """The right answer of a row: of a written one what is found in it, else all of it."""
        if isinstance(row, QuestionRow):
            return row.choices[row.answer]
        found = self.find(row.completion)
        return row.completion if found is None else found

    def is_right(self, row: Asked, text: str) -> bool:
        """Whether a text has the row's answer."""
        found = self.find(text)
        return found is not None and _plain(found) == _plain(self.wanted(row))


def _plain(answer: str) -> str:
    return _IGNORED.sub("", answer.strip()).strip().lower()


def write_answers(
    model: Model,
    rows: Sequence[Asked],
    config: EvalConfig,
    told: Callable[[int, int], None] = lambda done, n: None,
) -> Answers:
    """What a model writes after each prompt, and whether it is right: the measure "match".

    told(done, n) is called after each of n answers. Raises DataError for prompts that do not fit
    into the model's context with their answer, by place.
    """
    asking, finder = QuestionFormat.of(config, model), Finder(config.match or "", config.match_last)
    most = asking.most - config.answer_tokens
    prompts = map_rows(
        rows, lambda row: _fitting(prompt_ids(row.prompt, model, asking), most, asking)
    )
    how = Sampling(temperature=0, stop=config.stop)
    session = Session(model, max(map(len, prompts)) + config.answer_tokens)
    texts, read = list[str](), list[int]()
    for done, ids in enumerate(prompts, 1):
        text, read = _write(session, ids, read, how, config.answer_tokens)
        texts.append(text)
        told(done, len(prompts))
    right = np.array([finder.is_right(r, t) for r, t in zip(rows, texts, strict=True)], np.bool_)
    empty = [np.empty(0)] * len(rows)
    return Answers(empty, empty, {"match": right}, texts)


def _fitting(ids: Ids, most: int, asking: QuestionFormat) -> Ids:
    """The tokens of a prompt that the model reads, at most so many: the last ones, if any may be
    left out."""
    if len(ids) > most and (not asking.cut or most < 1):
        raise BadRow(
            f"has {len(ids)} tokens, wanted at most {most} before an answer in {asking.most}: "
            "--long cut leaves out the beginning, fewer --answer-tokens or --shots leave room"
        )
    return ids[-most:] if len(ids) > most else ids


def _write(
    session: Session, ids: Ids, before: Sequence[int], how: Sampling, n_tokens: int
) -> tuple[str, list[int]]:
    """The text after a prompt, and the tokens that the session has read then. before: those that it
    has read so far."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(ids[:-1], before, strict=False))
    n_same = sum(1 for _ in same)
    session.truncate(n_same)
    completion = Completion(session.model.tokenizer, how, ids, n_tokens)
    text = ""
    for token in session.greedy(ids[n_same:]):
        piece = completion.accept(token)
        text += piece.text
        if piece.finish is not None:
            break
    return text, [*ids, *completion.tokens][: session.n_past]
