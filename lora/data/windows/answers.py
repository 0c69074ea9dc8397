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

from pyggml.chat.messages import BadValue, Messages
from pyggml.errors import DataError
from pyggml.lora.config import DataConfig
from pyggml.lora.data.reading.sources import FileSummary, Source
from pyggml.lora.data.records.rows import (
    ChatRow,
    CompletionRow,
    LabelledRow,
    PreferenceRow,
    Row,
    RowPlace,
)
from pyggml.lora.data.tokens.chats import CUT, first_round
from pyggml.lora.data.tokens.documents import Document, Documents
from pyggml.lora.data.tokens.encode import Encoding, encode
from pyggml.lora.data.windows.batches import Dataset, FileWindows
from pyggml.lora.data.windows.lengths import check_lengths
from pyggml.lora.data.windows.packing import held_out
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A prompt and a completion, whose trained tokens count; and whether it is wanted."""

    ids: Sequence[int] | np.ndarray
    trained: np.ndarray
    is_wanted: bool

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int) -> Answer:
        """The first n tokens."""
        return replace(self, ids=self.ids[:n], trained=self.trained[:n])

    def after_prompt_of(self, other: Answer) -> Answer:
        """This completion after another answer's prompt."""
        mine, theirs = int(np.argmax(self.trained)), int(np.argmax(other.trained))
        return Answer(
            [*other.ids[:theirs], *self.ids[mine:]],
            np.concatenate([other.trained[:theirs], self.trained[mine:]]),
            self.is_wanted,
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
    lacks. Where encoding cuts long chats, both lose the same first rounds.

    Raises BadValue for a row of another kind, for answers that are the same once they are written,
    and as `encode` does.
    """
    if not isinstance(row, PreferenceRow | LabelledRow):
        raise BadValue(
            "has no preference: wanted prompt, chosen and rejected, or prompt, completion and label"
        )
    most, notes = encoding.chats.most if encoding.chats else 0, list[str]()
    if encoding.chats is not None:  # which would cut each answer's prompt apart
        encoding = replace(encoding, chats=replace(encoding.chats, most=0))
    documents = _documents(row, tokenizer, encoding)
    while most and sum(map(len, documents)) > most and (shorter := _without_round(row)):
        row, notes = shorter, [CUT]
        documents = _documents(row, tokenizer, encoding)
    documents = [replace(d, notes=(*notes, *d.notes)) for d in documents]
    if isinstance(row, PreferenceRow):
        _check_differ(*documents)
        return documents if any(row.read_only) else _after_same_prompt(*documents)
    given = [documents[0], Document((), np.zeros(0, np.bool_))]
    return given if row.label else given[::-1]


def _documents(
    row: PreferenceRow | LabelledRow, tokenizer: Tokenizer, encoding: Encoding
) -> list[Document]:
    """The answers of a row after its prompt, one or two, in the file's order."""
    if isinstance(row, LabelledRow):
        answers = [(row.completion, row.read_only)]
    else:
        answers = [(row.chosen, row.read_only[0]), (row.rejected, row.read_only[1])]
    whole = [encode(_whole(row, *answer), tokenizer, encoding) for answer in answers]
    return [
        d if d.trained is not None else replace(d, trained=np.ones(len(d), np.bool_)) for d in whole
    ]


def _whole(
    row: PreferenceRow | LabelledRow, completion: str | Messages, skipped: frozenset[int]
) -> Row:
    """Prompt and completion as one row, of which the completion is learned."""
    if isinstance(row.prompt, str) or isinstance(completion, str):
        return CompletionRow(row.place, str(row.prompt), str(completion))
    n = len(row.prompt)
    read_only = frozenset(range(n)) | {n + i for i in skipped}
    return ChatRow(row.place, (*row.prompt, *completion), row.tools, read_only)


def _without_round(row: PreferenceRow | LabelledRow) -> PreferenceRow | LabelledRow | None:
    """The row without the first round of its prompt; None if there is no more than one."""
    if isinstance(row.prompt, str) or not (left_out := first_round(row.prompt)):
        return None
    return replace(row, prompt=tuple(m for i, m in enumerate(row.prompt) if i not in left_out))


def _check_differ(chosen: Document, rejected: Document) -> None:
    if list(chosen.ids) == list(rejected.ids):
        raise BadValue(
            "has a chosen and a rejected answer that are the same as the model reads them",
            says_all=True,
        )


def _after_same_prompt(*answers: Document) -> list[Document]:
    """Both answers learned from the first token on that is not the prompt's in both.

    Where the prompt ends inside a token of one answer, the other's prompt would go further.
    """
    starts = [int(np.argmax(np.asarray(d.trained))) for d in answers]
    first = min(starts)
    same = list(answers[0].ids[:first]) == list(answers[1].ids[:first])
    if starts[0] == starts[1] or not same:
        return [*answers]
    parts = []
    for document, start in zip(answers, starts, strict=True):
        trained = np.array(document.trained)
        trained[first:start] = True
        parts.append(replace(document, trained=trained))
    return parts


def windows_of(
    documents: Documents, file: str, unit: str, config: DataConfig, val_split: float, kind: str
) -> FileWindows:
    """Windows of "pairs", or of the single answers of "labels", and those held out: of documents
    that `documents_of` made, two for each row of this file.

    Pairs are single answers too, a wanted and an unwanted one. Raises DataError for rows that have
    no pair or do not fit into a window.
    """
    alone, units, places = kind == "labels", list[list[Answer]](), list[RowPlace]()
    assert documents.places is not None or not len(documents)
    for i in range(0, len(documents), 2):
        assert documents.places is not None
        place = RowPlace(file, unit, *documents.places[i].tolist())
        answers = [_answer(documents, i + j) for j in (0, 1) if documents.lengths[i + j]]
        if len(answers) == 1 and not alone:
            raise DataError(
                f"{file}: {place} has a label, wanted a pair: prompt, chosen and rejected"
            )
        of_row = [[answer] for answer in answers] if alone else [answers]
        units += of_row
        places += [place] * len(of_row)
    if config.long_chats == "refuse":
        n_tokens = np.array([_n_tokens(u) for u in units])
        check_lengths(n_tokens, config.ctx, places.__getitem__, ", prompts included")
    n, fitting = len(units), [_fit(u, config.ctx + 1, config.long_chats) for u in units]
    n_truncated = sum(f is not None and f != u for f, u in zip(fitting, units, strict=True))
    units = [unit for unit in fitting if unit is not None]
    lengths = [_n_tokens(u) for u in units]
    out = set(held_out(lengths, val_split, config.val_shuffle))
    out = out if len(out) > alone else set()  # one answer has none to be compared with
    parts = [[u for i, u in enumerate(units) if (i in out) == side] for side in (False, True)]
    if not parts[0]:
        raise DataError(
            f"{file}: every row ({n}) is longer than a window of {config.ctx}: give a larger --ctx"
        )
    train, validation = (preferences(part, config.ctx, mismatch=alone) for part in parts)
    summary = FileSummary(Source(Path(file)), kind, len(units), len(out), sum(lengths))
    summary = replace(summary, n_dropped=n - len(units), n_truncated=n_truncated)
    return FileWindows(train, validation, summary)


def _n_tokens(unit: Sequence[Answer]) -> int:
    return sum(map(len, unit))


def _fit(unit: list[Answer], width: int, long: str) -> list[Answer] | None:
    """Answers that fit into a window together; None for those that are left out.

    long: "truncate" takes the first tokens of the longer one, then of both, if in each a token is
    learned and they still differ
    """
    lengths = [len(a) for a in unit]
    if sum(lengths) <= width:
        return unit
    if long != "truncate":
        return None
    other = lengths[1] if len(unit) > 1 else 0
    n = min(lengths[0], max(width // len(unit), width - other))
    cut = [answer.first(k) for answer, k in zip(unit, (n, width - n), strict=False)]
    is_learned = all(a.trained[1:].any() for a in cut)
    differ = len(cut) == 1 or list(cut[0].ids) != list(cut[1].ids)
    return cut if is_learned and differ else None


def _answer(documents: Documents, i: int) -> Answer:
    """The answer that is document i; the first of each row's two is the wanted one."""
    assert documents.trained is not None
    first = int(documents.starts[i])
    at = slice(first, first + int(documents.lengths[i]))
    return Answer(documents.ids[at], documents.trained[at], is_wanted=i % 2 == 0)


# -- windows ------------------------------------------------------------------------------------


def preferences(units: Sequence[Sequence[Answer]], ctx: int, mismatch: bool) -> Preferences:
    """Windows of units, each at most ctx + 1 tokens and whole in one window.

    mismatch: also make the windows of exchanged completions. Each completion of a window moves on
    to the next prompt, so the window needs no more room. Raises DataError if there are none to
    exchange.
    """
    windows = [[a for unit in w for a in unit] for w in _place(units, ctx + 1)]
    if not mismatch:
        return fill_windows(windows, ctx)
    if len(units) == 1:
        raise DataError("single answers are compared with one another: there is one, wanted two")
    mismatched = fill_windows([_moved_on(windows, i) for i in range(len(windows))], ctx)
    return replace(fill_windows(windows, ctx), mismatched=mismatched)


def _place(units: Sequence[Sequence[Answer]], width: int) -> list[list[Sequence[Answer]]]:
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
            documents[at], signs[row, i] = number, 1 if answer.is_wanted else -1
            first, number = first + n, number + 1
    return Preferences(tokens, documents, trained, signs=signs)
