"""A file → the windows to train on and those held out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pyggml.errors import DataError
from pyggml.lora.data.files import is_json_lines, read_lines, read_text
from pyggml.lora.data.windows import Corpus, pack
from pyggml.tokenizer import Tokenizer

SPECIAL_TOKENS = ("auto", "plain", "parse")


def read_corpus(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    ctx: int,
    val_split: float,
    special_tokens: str = "auto",
) -> Corpus:
    """Windows of a UTF-8 text file, or of JSON Lines with {"text": ...} (.jsonl, .json, .ndjson).

    val_split        share of the tokens that is held out. Of a text: its last windows, at least one
                     if there are two. Of JSON Lines: whole documents, those that bring the share
                     nearer, asked from the last to the first; none if all are too long
    special_tokens   "parse": <|im_start|> in the text is that token; "plain": some characters;
                     "auto": parsed in JSON Lines, whose rows are written for training, and plain in
                     text, which may only talk about it

    Raises DataError for a file that cannot be read, is empty, is not UTF-8 (with the byte), has
    lines that are not as wanted (with their numbers), or is shorter than a window.
    """
    path = Path(path)
    documents = read_documents(path, tokenizer, special_tokens)
    n_tokens = sum(len(d) for d in documents)
    if is_json_lines(path):
        held_out = set(_held_out([len(d) for d in documents], val_split))
        parts = [[d for i, d in enumerate(documents) if (i in held_out) == out] for out in (0, 1)]
        train, validation = (pack(part, ctx) for part in parts)
    else:
        whole, held_out = pack(documents, ctx), set()
        cut = len(whole)
        if val_split and cut > 1:
            cut -= min(max(round(val_split * cut), 1), cut - 1)
        train, validation = whole.part(slice(cut)), whole.part(slice(cut, None))
    if n_tokens < ctx + 1 or not len(train):
        raise DataError(
            f"{path}: holds {n_tokens} tokens, wanted at least {ctx + 1} for one window of {ctx} "
            "and the token after it: give more text or a smaller --ctx"
        )
    return Corpus(train, validation if len(validation) else None, len(documents), len(held_out))


def read_documents(
    path: Path, tokenizer: Tokenizer, special_tokens: str = "auto"
) -> list[list[int]]:
    """The token ids of each document of a file; a text is one. See `read_corpus`."""
    lines = is_json_lines(path)
    texts = read_lines(path) if lines else [read_text(path)]
    parse = special_tokens == "parse" or (special_tokens == "auto" and lines)
    return [_encoded(tokenizer, text, parse) for text in texts]


def _encoded(tokenizer: Tokenizer, text: str, parse: bool) -> list[int]:
    """Ids with BOS and EOS where the tokenizer adds them; one that the text has is not doubled."""
    ids = tokenizer.encode(text, parse_special=parse)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if parse and tokenizer.add_bos and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if parse and tokenizer.add_eos and ids[-2:] == [eos, eos]:
        ids = ids[:-1]
    return ids


def _held_out(lengths: Sequence[int], share: float) -> list[int]:
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
