"""A row → its tokens, and which of them are learned.

row             tokens                                               learned
TextRow         the text                                             all
CompletionRow   prompt and completion as one text, an end of text    from the first token of the
                                                                     completion on
ChatRow         messages as the chat template writes them            answers, and the end of each
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml.lora.config import DataConfig
from pyggml.lora.data.chats import Chats, encode_chat
from pyggml.lora.data.documents import Document
from pyggml.lora.data.long_text import whole
from pyggml.lora.data.rows import BadRow, ChatRow, CompletionRow, Row, TextRow
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoding:
    """How rows become tokens: with the tokenizer and the rows, all that the tokens depend on.

    special_tokens   "parse": <|im_start|> in the text is that token; "plain": some characters;
                     "auto": parsed in rows, which are written for training, and plain in text,
                     which may only talk about it
    chats            None: with the model's own template
    """

    special_tokens: str = "auto"
    chats: Chats | None = None

    @staticmethod
    def of(config: DataConfig, tokenizer: Tokenizer) -> Encoding:
        """As the settings say. Raises TemplateError as `Chats.of` does."""
        return Encoding(config.special_tokens, Chats.of(config, tokenizer))

    def parses(self, plain: bool) -> bool:
        """Whether names of special tokens are these tokens: in rows, or in plain text."""
        return self.special_tokens == "parse" or (self.special_tokens == "auto" and not plain)


AUTO = Encoding()


def encode(row: Row, tokenizer: Tokenizer, encoding: Encoding) -> Document:
    """The tokens of a row.

    Raises BadRow for a row that has none, which is told with its place as other bad rows are.
    """
    if isinstance(row, ChatRow):
        return encode_chat(row, tokenizer, encoding.chats)
    parse = encoding.parses(plain=isinstance(row, TextRow) and row.plain)
    if isinstance(row, TextRow):
        return Document(whole(row.text, tokenizer, parse))
    if isinstance(row, CompletionRow):
        return _completion(row, tokenizer, parse)
    raise BadRow(f"is a {type(row).__name__}, which cannot be encoded")


def _completion(row: CompletionRow, tokenizer: Tokenizer, parse: bool) -> Document:
    ids = whole(row.prompt + row.completion, tokenizer, parse)
    if not row.prompt:
        return Document(ids)
    prompt = whole(row.prompt, tokenizer, parse)
    same = zip(ids, prompt, strict=False)  # a token across the seam is learned
    first = next((i for i, (a, b) in enumerate(same) if a != b), min(len(ids), len(prompt)))
    end = tokenizer.eos_id
    if end is not None and ids[-1] not in (end, tokenizer.eot_id):
        ids.append(end)
    return Document(ids, np.arange(len(ids)) >= first)
