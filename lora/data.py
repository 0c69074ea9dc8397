"""Text → token windows → batches.

A window is ctx + 1 tokens: ctx inputs, each with its next token as target; windows do not overlap.
Plain text is one document. In JSON Lines every line is a document of its own: documents lie one
after the other in the windows, but no token attends to another document or is its target.
A batch is windows one after the other in one row of tokens; `span` keeps them apart.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyggml.errors import DataError
from pyggml.tokenizer import Tokenizer

_JSON_LINES = (".jsonl", ".json", ".ndjson")
_SHOWN = 5  # faulty lines that an error lists


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T = windows · ctx tokens as `pyggml.models.Inputs` wants them.

    tokens, positions, targets (T,) int32, span (T, 2) int32; weights (T,) float32 are 1 / number of
    trained tokens of the whole step, or 0 where the next token is none of this document.
    """

    tokens: np.ndarray
    positions: np.ndarray
    span: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Windows: `tokens` and the number of the document of each, both (n, ctx + 1) int32.

    A window that is not full ends in tokens that are documents of their own: they have no target.
    """

    tokens: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ctx(self) -> int:
        return int(self.tokens.shape[1]) - 1

    def n_targets(self, windows: Sequence[int] | np.ndarray) -> int:
        """Trained tokens of these windows."""
        return int(np.count_nonzero(_is_target(self.documents[windows])))

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The windows in the order in which this epoch reads them, a function of nothing else."""
        return np.random.default_rng([seed, epoch]).permutation(len(self))

    def batches(self, windows: Sequence[int] | np.ndarray, size: int) -> Iterator[Batch]:
        """The batches of one step over these windows, `size` in each; the last is filled up.

        A window that only fills up has weight 0 throughout.
        """
        total = max(self.n_targets(windows), 1)
        for first in range(0, len(windows), size):
            yield self._batch(windows[first : first + size], size, total)

    def _batch(self, windows: Sequence[int] | np.ndarray, size: int, total: int) -> Batch:
        tokens = np.zeros((size, self.ctx + 1), np.int32)
        documents = np.tile(_no_documents(self.ctx + 1), (size, 1))
        tokens[: len(windows)] = self.tokens[windows]
        documents[: len(windows)] = self.documents[windows]
        column = np.arange(self.ctx, dtype=np.int32)
        is_first = np.diff(documents[:, :-1], axis=1, prepend=documents[:, :1] - 1) != 0
        start = np.maximum.accumulate(np.where(is_first, column, 0), axis=1)
        row = np.arange(size, dtype=np.int32)[:, None] * self.ctx
        span = np.stack([row + start, np.broadcast_to(row + column + 1, start.shape)], axis=-1)
        return Batch(
            tokens=tokens[:, :-1].reshape(-1),
            positions=(column - start).reshape(-1).astype(np.int32),
            span=span.reshape(-1, 2).astype(np.int32),
            targets=tokens[:, 1:].reshape(-1),
            weights=_is_target(documents).reshape(-1).astype(np.float32) / np.float32(total),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """What is trained on, and what is held out (None if nothing is)."""

    train: Dataset
    validation: Dataset | None

    def digest(self) -> str:
        """SHA-256 of every window: two runs with the same digest read the same numbers."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for array in (part.tokens, part.documents) if part else ():
                digest.update(repr(array.shape).encode() + array.tobytes())
        return digest.hexdigest()


def _is_target(documents: np.ndarray) -> np.ndarray:
    """(n, ctx + 1) -> (n, ctx): whether the next token is of the same document."""
    return np.asarray(documents[:, 1:] == documents[:, :-1])


def _no_documents(n: int) -> np.ndarray:
    """Numbers of n documents of one token, all different: what fills up a window."""
    return -1 - np.arange(n, dtype=np.int32)


# -- from files ---------------------------------------------------------------------------------


def read_corpus(
    path: str | os.PathLike[str], tokenizer: Tokenizer, ctx: int, val_split: float
) -> Corpus:
    """Windows of a UTF-8 text file, or of JSON Lines with {"text": ...} (.jsonl, .json, .ndjson).

    The last `val_split` of the windows (of JSON Lines: of the documents), at least one if there are
    two, are held out. Raises DataError for a file that cannot be read, is empty, is not UTF-8 (with
    the byte), has lines that are not as wanted (with their numbers), or is shorter than a window.
    """
    path = Path(path)
    text = read_text(path)
    if path.suffix.lower() in _JSON_LINES:
        documents = [tokenizer.encode(t) for t in _documents(path, text)]
        cut = len(documents) - _held_out(len(documents), val_split)
        train, held_out = _pack(documents[:cut], ctx), _pack(documents[cut:], ctx)
    else:
        ids = tokenizer.encode(text)
        whole = _pack([ids], ctx)
        cut = len(whole) - _held_out(len(whole), val_split)
        train, held_out = _part(whole, slice(cut)), _part(whole, slice(cut, None))
        documents = [ids]
    n_tokens = sum(len(d) for d in documents)
    if n_tokens < ctx + 1 or not len(train):
        raise DataError(
            f"{path}: holds {n_tokens} tokens, wanted at least {ctx + 1} for one window of {ctx} "
            "and the token after it: give more text or a smaller --ctx"
        )
    return Corpus(train, held_out if len(held_out) else None)


def _held_out(n: int, share: float) -> int:
    return min(max(round(share * n), 1), n - 1) if share and n > 1 else 0


def _pack(documents: Sequence[Sequence[int]], ctx: int) -> Dataset:
    """Documents one after the other, cut into windows; those without any target are left out."""
    n = sum(len(d) for d in documents)
    width, n_fill = ctx + 1, -n % (ctx + 1)
    tokens, owner = np.zeros(n + n_fill, np.int32), np.zeros(n + n_fill, np.int32)
    first = 0
    for number, document in enumerate(documents):
        tokens[first : first + len(document)] = document
        owner[first : first + len(document)] = number
        first += len(document)
    owner[n:] = _no_documents(n_fill)
    packed = Dataset(tokens.reshape(-1, width), owner.reshape(-1, width))
    return _part(packed, np.flatnonzero(_is_target(packed.documents).any(axis=1)))


def _part(whole: Dataset, which: slice | np.ndarray) -> Dataset:
    return Dataset(whole.tokens[which], whole.documents[which])


def read_text(path: Path) -> str:
    """A file's UTF-8 text, its line ends as they are.

    Raises DataError if it cannot be read, is not UTF-8 (with the byte) or holds nothing to read.
    """
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from error
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is 0x{raw[error.start]:02x}, which is not UTF-8 there"
        ) from None
    if not text.strip():
        raise DataError(f"{path}: is empty, wanted text")
    return text


def _documents(path: Path, text: str) -> list[str]:
    """The texts of JSON Lines; empty lines are skipped. DataError lists the faulty lines."""
    documents, faults = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        document, fault = _document(line)
        documents.append(document)
        if fault:
            faults.append(f"line {number} is {fault}")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        wanted = 'wanted one JSON object with a string "text" on each line'
        raise DataError(f"{path}: {'; '.join(faults[:_SHOWN])}{more}; {wanted}")
    return documents


def _document(line: str) -> tuple[str, str | None]:
    """The text of a line, or what is wrong with it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"no JSON ({error})"
    if not isinstance(found, dict):
        return "", f"a JSON {type(found).__name__}"
    if "text" not in found:
        names = ", ".join(str(key)[:20] for key in list(found)[:5]) or "nothing"
        return "", f'an object without "text" (it has {names})'
    document = found["text"]
    if not isinstance(document, str):
        return "", f'an object whose "text" is a {type(document).__name__}'
    return document, None if document.strip() else 'an object whose "text" is empty'
