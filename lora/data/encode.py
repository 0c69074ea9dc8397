"""A row → its tokens, and which of them are learned.

row             tokens                                               learned
TextRow         the text                                             all
CompletionRow   prompt and completion as one text, an end of text    from the first token of the
                                                                     completion on
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml.errors import DataError
from pyggml.lora.data.rows import CompletionRow, Row, TextRow
from pyggml.lora.data.windows import Document
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoding:
    """How rows become tokens: with the tokenizer and the rows, all that the tokens depend on.

    special_tokens   "parse": <|im_start|> in the text is that token; "plain": some characters;
                     "auto": parsed in rows, which are written for training, and plain in text,
                     which may only talk about it
    """

    special_tokens: str = "auto"

    def parses(self, row: Row) -> bool:
        """Whether names of special tokens in this row are these tokens."""
        meant = not (isinstance(row, TextRow) and row.plain)
        return self.special_tokens == "parse" or (self.special_tokens == "auto" and meant)


def encode(row: Row, tokenizer: Tokenizer, encoding: Encoding) -> Document:
    """The tokens of a row.

    Raises DataError for a row of a kind that this has no rule for.
    """
    parse = encoding.parses(row)
    if isinstance(row, TextRow):
        return Document(_ids(tokenizer, row.text, parse))
    if isinstance(row, CompletionRow):
        return _completion(row, tokenizer, parse)
    raise DataError(f"{row.place.file}: {row.place} is a {type(row).__name__}, which has no tokens")


def _completion(row: CompletionRow, tokenizer: Tokenizer, parse: bool) -> Document:
    ids = _ids(tokenizer, row.prompt + row.completion, parse)
    if not row.prompt:
        return Document(ids)
    prompt = _ids(tokenizer, row.prompt, parse)
    same = zip(ids, prompt, strict=False)  # a token across the seam is learned
    first = next((i for i, (a, b) in enumerate(same) if a != b), min(len(ids), len(prompt)))
    end = tokenizer.eos_id
    if end is not None and ids[-1] not in (end, tokenizer.eot_id):
        ids.append(end)
    return Document(ids, np.arange(len(ids)) >= first)


def _ids(tokenizer: Tokenizer, text: str, parse: bool) -> list[int]:
    """Ids with BOS and EOS where the tokenizer adds them; one that the text has is not doubled."""
    ids = tokenizer.encode(text, parse_special=parse)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if parse and tokenizer.add_bos and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if parse and tokenizer.add_eos and ids[-2:] == [eos, eos]:
        ids = ids[:-1]
    return ids
