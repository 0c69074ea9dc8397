"""A file → the windows to train on and those held out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pyggml.errors import DataError
from pyggml.lora.config import DataConfig
from pyggml.lora.data.encode import Encoding, encode
from pyggml.lora.data.files import read_rows
from pyggml.lora.data.rows import Row
from pyggml.lora.data.windows import Corpus, Dataset, Document, pack
from pyggml.tokenizer import Tokenizer


def read_corpus(
    path: str | os.PathLike[str], tokenizer: Tokenizer, config: DataConfig | None = None
) -> Corpus:
    """Windows of a text, or of the rows of JSON Lines, JSON or CSV; see `pyggml.lora.data.files`.

    Of rows with prompt and completion the completion is learned, and an end of text after it; each
    lies whole in a window.

    Of `config`:
    val_split        share of the tokens that is held out. Of a text: its last windows, at least one
                     if there are two. Of rows: whole ones, those that bring the share nearer, asked
                     from the last to the first; none if all are too long
    special_tokens   "parse": <|im_start|> in the text is that token; "plain": some characters;
                     "auto": parsed in rows, which are written for training, and plain in text,
                     which may only talk about it

    Raises DataError for a file that cannot be read, is empty, is not UTF-8 (with the byte), has
    rows that are not as wanted or do not fit into a window (by number), or is shorter than one.
    """
    c = config or DataConfig()
    kind, rows = read_rows(Path(path))
    documents = encode_rows(rows, tokenizer, c.special_tokens)
    n_tokens, whole = sum(len(d) for d in documents), any(d.trained is not None for d in documents)
    if whole:
        _check_lengths(path, rows, documents, c.ctx)
    if kind == "text":
        train, validation, n_held_out = *_split_windows(pack(documents, c.ctx), c.val_split), 0
    else:
        out_there = set(held_out([len(d) for d in documents], c.val_split))
        parts = [[d for i, d in enumerate(documents) if (i in out_there) == out] for out in (0, 1)]
        train, validation = (pack(part, c.ctx, whole) for part in parts)
        n_held_out = len(out_there)
    if not len(train) or (n_tokens < c.ctx + 1 and not whole):
        raise DataError(
            f"{path}: holds {n_tokens} tokens, wanted at least {c.ctx + 1} for one window of "
            f"{c.ctx} and the token after it: give more text or a smaller --ctx"
        )
    held_out_windows = validation if len(validation) else None
    return Corpus(train, held_out_windows, len(documents), n_held_out, kind, c.settled())


def _split_windows(windows: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """All but the last windows, and these: a share of all, at least one if there are two."""
    cut = len(windows)
    if share and cut > 1:
        cut -= min(max(round(share * cut), 1), cut - 1)
    return windows.part(slice(cut)), windows.part(slice(cut, None))


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, special_tokens: str = "auto"
) -> list[Document]:
    """The tokens of each row. See `read_corpus`."""
    how = Encoding(special_tokens)
    return [encode(row, tokenizer, how) for row in rows]


def _check_lengths(
    path: str | os.PathLike[str], rows: Sequence[Row], documents: Sequence[Document], ctx: int
) -> None:
    """No answer is cut without a word."""
    long = [i for i, d in enumerate(documents) if len(d) > ctx + 1]
    if long:
        longest = max(long, key=lambda i: len(documents[i]))
        others = f" and {len(long) - 1} more are too long" if len(long) > 1 else ""
        raise DataError(
            f"{path}: {rows[longest].place} has {len(documents[longest])} tokens{others}, wanted "
            f"at most {ctx + 1}, those of a window of {ctx}: give a larger --ctx or shorter rows"
        )


def held_out(lengths: Sequence[int], share: float) -> list[int]:
    """Documents whose tokens come nearest to this share of all, found from the last to the first.

    They never have more than half of all, so one document at least is left.
    """
    whole, taken, found = sum(lengths), 0, list[int]()
    for i in reversed(range(len(lengths)) if share else ()):
        more = taken + lengths[i]
        if abs(more - share * whole) <= abs(taken - share * whole) and 2 * more <= whole:
            taken = more
            found.append(i)
    return found
