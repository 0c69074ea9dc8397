"""Questions as they are put: with lettered choices, in a text around them, behind examples.

Of a row comes a row, so that questions with choices, and rows whose answers are written, are put
alike. Examples are the first questions of the same category, each with its answer, an empty line
after each, as lm-evaluation-harness has them.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pyggml.errors import ConfigError, DataError
from pyggml.lora.config import EvalConfig
from pyggml.lora.data.records.rows import CompletionRow, QuestionRow, Row

Exercise = QuestionRow | CompletionRow  # with choices, or with an answer to write
_LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Asking:
    """How questions are put, by the settings of these names. delimiter: before an answer."""

    letters: bool = False
    ask: str = "{}"
    n_shots: int = 0
    delimiter: str = " "

    @staticmethod
    def of(config: EvalConfig) -> Asking:
        delimiter = " " if config.delimiter is None else config.delimiter
        return Asking(config.letters, config.ask or "{}", config.shots, delimiter)

    def rows(self, rows: Sequence[Row], shots: Sequence[Row] | None = None) -> list[Row]:
        """The rows as they are put. shots: those that examples are taken from; None: the rows.

        Raises ConfigError for rows that are no questions, and DataError for a category with too few
        examples, or more choices than letters.
        """
        if self == Asking(delimiter=self.delimiter):
            return [*rows]
        exercises = [self._put(row) for row in rows]
        if not self.n_shots:
            return [*exercises]
        examples = exercises if shots is None else [self._put(row) for row in shots]
        return [self._behind_shots(row, examples) for row in exercises]

    def _put(self, row: Row) -> Exercise:
        if not isinstance(row, Exercise) or (self.letters and isinstance(row, CompletionRow)):
            what = "questions with choices" if self.letters else "questions"
            raise ConfigError(f"{row.place.file}: {row.place} is none of the {what} to be put so")
        prompt = row.prompt
        if isinstance(row, QuestionRow) and self.letters:
            if len(row.choices) > len(_LETTERS):
                raise DataError(f"{row.place.file}: {row.place} has {len(row.choices)} choices, "
                                f"wanted at most {len(_LETTERS)} for letters")  # fmt: skip
            pairs = zip(_LETTERS, row.choices, strict=False)
            prompt = "\n".join([prompt, *(f"{letter}. {choice}" for letter, choice in pairs)])
            row = replace(row, choices=tuple(_LETTERS[: len(row.choices)]))
        return replace(row, prompt=self.ask.replace("{}", prompt))

    def _behind_shots(self, row: Exercise, shots: Sequence[Exercise]) -> Exercise:
        kind = category_of(row)
        alike = (s for s in shots if category_of(s) in (kind, "") and s.prompt != row.prompt)
        examples = [*islice(alike, self.n_shots)]
        if len(examples) < self.n_shots:
            of = f" of the category {kind}" if kind else ""
            raise DataError(
                f"{row.place.file}: {row.place} has {len(examples)} other questions{of} to stand "
                f"before it, wanted {self.n_shots}: fewer --shots, or others by --shots-file"
            )
        texts = [f"{s.prompt}{self.delimiter}{answer_of(s)}\n\n" for s in examples]
        return replace(row, prompt="".join([*texts, row.prompt]))


def category_of(row: Row) -> str:
    """ "" of rows that have none."""
    return row.category if isinstance(row, QuestionRow) else ""


def answer_of(row: Exercise) -> str:
    """The right answer, with its reasoning if the row has that."""
    if isinstance(row, CompletionRow):
        return row.completion
    return row.worked or row.choices[row.answer]
