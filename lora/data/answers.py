"""Rows → answers → windows of whole answers.

Of rows of "pairs" a window holds whole pairs, a chosen answer and then its rejected one; of rows of
"labels", whole single answers. Each answer follows a copy of its prompt. Prompt and answer form one
document; documents do not see each other. Answers are numbered from the start of their window.

Single answers have a second dataset: the same prompts, each with the completion of another answer
of the same window. Their gain over a reference estimates the KL: how far the model has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyggml.errors import DataError
from pyggml.lora.data.documents import Document, Documents, Writer
from pyggml.lora.data.encode import Encoding, encode
from pyggml.lora.data.files import Faults
from pyggml.lora.data.packing import held_out
from pyggml.lora.data.rows import (
    BadRow,
    ChatRow,
    CompletionRow,
    LabelledRow,
    Messages,
    Place,
    PreferenceRow,
    Row,
)
from pyggml.lora.data.sources import FileSummary, Source
from pyggml.lora.data.windows import Corpus, Dataset
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A prompt and a completion, whose trained tokens count; and whether it is wanted."""

    ids: Sequence[int] | np.ndarray
    trained: np.ndarray
    wanted: bool

    def __len__(self) -> int:
        return len(self.ids)

    def after_prompt_of(self, other: Answer) -> Answer:
        """This completion after another answer's prompt."""
        mine, theirs = int(np.argmax(self.trained)), int(np.argmax(other.trained))
        return Answer(
            [*other.ids[:theirs], *self.ids[mine:]],
            np.concatenate([other.trained[:theirs], self.trained[mine:]]),
            self.wanted,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Preferences(Dataset):
    """Windows of whole answers.

    signs        (n, room) int8: of each answer of a window 1 if it is wanted, −1 if it is not; 0
                 where there is none
    mismatched   of single answers, the same prompts with exchanged completions
    """

    signs: np.ndarray
    mismatched: Preferences | None = None

    @property
    def room(self) -> int:
        """The most answers that a window holds."""
        return int(self.signs.shape[1])

    def part(self, which: slice | np.ndarray) -> Preferences:
        d = super().part(which)
        return Preferences(
            d.tokens, d.documents, d.trained, d.repeats, d.lengths, signs=self.signs[which]
        )

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        return *super().arrays, self.signs

    def ordinals(self) -> np.ndarray:
        """(n, width) int32: documents, counted from each window's start; −1 where there is none."""
        documents = self.documents
        is_first = np.diff(documents, axis=1, prepend=-1 - documents[:, :1]) != 0
        numbers = np.cumsum(is_first & (documents >= 0), axis=1) - 1
        return np.where(documents >= 0, numbers, -1).astype(np.int32)


# -- rows ---------------------------------------------------------------------------------------


def documents_of(row: Row, tokenizer: Tokenizer, encoding: Encoding) -> list[Document]:
    """The wanted answer of a row and the other one; an empty document for what a row with a label
    lacks.

    Raises BadRow for a row of another kind, and as `encode` does.
    """

    def document(completion: str | Messages) -> Document:
        assert isinstance(row, PreferenceRow | LabelledRow)
        whole = encode(_whole(row, completion), tokenizer, encoding)
        learned = np.ones(len(whole), np.bool_) if whole.trained is None else whole.trained
        return Document(whole.ids, learned)

    if isinstance(row, LabelledRow):
        given = [document(row.completion), Document((), np.zeros(0, np.bool_))]
        return given if row.label else given[::-1]
    if not isinstance(row, PreferenceRow):
        raise BadRow(
            "has no preference: wanted prompt, chosen and rejected, or prompt, completion and label"
        )
    return [document(row.chosen), document(row.rejected)]


def _whole(row: PreferenceRow | LabelledRow, completion: str | Messages) -> Row:
    """Prompt and completion as one row, of which the completion is learned."""
    if isinstance(row.prompt, str) or isinstance(completion, str):
        return CompletionRow(row.place, str(row.prompt), str(completion))
    read_only = frozenset(range(len(row.prompt)))
    return ChatRow(row.place, (*row.prompt, *completion), row.tools, read_only)


def preference_corpus(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    ctx: int,
    val_split: float,
    kind: str,
    encoding: Encoding | None = None,
) -> Corpus:
    """Windows of "pairs", or of the single answers of "labels", and those held out.

    Pairs are single answers too, a wanted and an unwanted one. Raises DataError for rows that have
    no preference or do not fit into a window, and for fewer than two single answers.
    """
    writer = Writer(None)
    for row in rows:
        try:
            documents = documents_of(row, tokenizer, encoding or Encoding())
        except BadRow as bad:
            raise DataError(f"{row.place.file}: {bad.at(row.place)}") from None
        for document in documents:
            writer.add(document, row.place)
    file, unit = (rows[0].place.file, rows[0].place.unit) if rows else ("", "")
    return corpus_of(writer.documents(), file, unit, ctx, val_split, kind)


def corpus_of(
    documents: Documents, file: str, unit: str, ctx: int, val_split: float, kind: str
) -> Corpus:
    """The same of documents that `documents_of` made, two for each row of this file."""
    alone, units, places = kind == "labels", list[list[Answer]](), list[Place]()
    assert documents.places is not None or not len(documents)
    for i in range(0, len(documents), 2):
        assert documents.places is not None
        place = Place(file, unit, *documents.places[i].tolist())
        answers = [_answer(documents, i + j) for j in (0, 1) if documents.lengths[i + j]]
        if len(answers) == 1 and not alone:
            raise DataError(
                f"{file}: {place} has a label, wanted a pair: prompt, chosen and rejected"
            )
        of_row = [[answer] for answer in answers] if alone else [answers]
        units += of_row
        places += [place] * len(of_row)
    lengths = [sum(map(len, u)) for u in units]
    _check_lengths(lengths, places, ctx)
    out = set(held_out(lengths, val_split))
    out = out if len(out) > alone else set()  # one answer has none to be compared with
    parts = [[u for i, u in enumerate(units) if (i in out) == side] for side in (False, True)]
    train, validation = (preferences(part, ctx, mismatch=alone) for part in parts)
    whole = FileSummary(Source(Path(file)), kind, len(units), len(out), sum(lengths), Faults())
    return Corpus(train, validation if len(validation) else None, (whole,))


def _answer(documents: Documents, i: int) -> Answer:
    """The answer that is document i; the first of each row's two is the wanted one."""
    assert documents.trained is not None
    first = int(documents.starts[i])
    at = slice(first, first + int(documents.lengths[i]))
    return Answer(documents.ids[at], documents.trained[at], wanted=i % 2 == 0)


def _check_lengths(lengths: Sequence[int], places: Sequence[Place], ctx: int) -> None:
    """DataError for answers longer than a window: none is cut silently."""
    long = [i for i, n in enumerate(lengths) if n > ctx + 1]
    if long:
        i = max(long, key=lengths.__getitem__)
        others = f", the most of {len(long)} that are too long" if len(long) > 1 else ""
        raise DataError(
            f"{places[i].file}: {places[i]} has {lengths[i]} tokens, prompts included{others}, "
            f"wanted at most {ctx + 1}, those of a window of {ctx}: give a larger --ctx or shorter "
            "rows"
        )


# -- windows ------------------------------------------------------------------------------------


def preferences(units: Sequence[Sequence[Answer]], ctx: int, mismatch: bool) -> Preferences:
    """Windows of units, each at most ctx + 1 tokens and whole in one window.

    mismatch: also make the windows of exchanged completions. Each completion of a window moves on
    to the next prompt, so the window needs no more room. Raises DataError if there are none to
    exchange.
    """
    windows = [[a for unit in w for a in unit] for w in _placed(units, ctx + 1)]
    if not mismatch:
        return fill_windows(windows, ctx)
    if len(units) == 1:
        raise DataError("single answers are compared with one another: there is one, wanted two")
    others = fill_windows([_moved_on(windows, i) for i in range(len(windows))], ctx)
    return replace(fill_windows(windows, ctx), mismatched=others)


def _placed(units: Sequence[Sequence[Answer]], width: int) -> list[list[Sequence[Answer]]]:
    """The units of each window, in their order."""
    windows, room = list[list[Sequence[Answer]]](), 0
    for unit in units:
        n = sum(map(len, unit))
        if n > room:
            windows.append([])
            room = width
        windows[-1].append(unit)
        room -= n
    return windows


def _moved_on(windows: Sequence[Sequence[Answer]], i: int) -> list[Answer]:
    """The answers of a window, each with the completion of the one before it.

    An answer alone in its window gets the last completion of the window before.
    """
    window = windows[i]
    before = [window[-1] if len(window) > 1 else windows[i - 1][-1], *window[:-1]]
    return [other.after_prompt_of(a) for a, other in zip(window, before, strict=True)]


def fill_windows(windows: Sequence[Sequence[Answer]], ctx: int) -> Preferences:
    """Windows of these answers; an answer longer than a window is cut."""
    shape = (len(windows), ctx + 1)
    signs = np.zeros((len(windows), max(map(len, windows), default=0)), np.int8)
    tokens, trained = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    documents, number = np.tile(-1 - np.arange(ctx + 1, dtype=np.int32), (len(windows), 1)), 0
    for row, window in enumerate(windows):
        first = 0
        for i, answer in enumerate(window):
            n = min(len(answer), ctx + 1 - first)
            at = (row, slice(first, first + n))
            tokens[at], trained[at] = answer.ids[:n], answer.trained[:n]
            documents[at], signs[row, i] = number, 1 if answer.wanted else -1
            first, number = first + n, number + 1
    return Preferences(tokens, documents, trained, signs=signs)
