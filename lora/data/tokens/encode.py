"""A row → its tokens, and which of them are learned.

row             tokens                                               learned
TextRow         the text; of rows, an end of text                    all
CompletionRow   prompt and completion as one text, an end of text    from the first token of the
                                                                     completion on
                a question and its answer, where there is a chat     the answer, and its end
                template: a chat
ChatRow         messages as the chat template writes them            answers, and the end of each

The end of text stands once, also where the text has it already. Tokens of a row with a weight are
learned by that share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.lora.config import DataConfig
from pyggml.lora.data.records.rows import ChatRow, CompletionRow, Row, TextRow
from pyggml.lora.data.tokens.chats import Chats, encode_chat
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.tokens.long_text import whole
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoding:
    """How rows become tokens: with the tokenizer and the rows, all that the tokens depend on.

    special_tokens   "parse": <|im_start|> in the text is that token; "plain": some characters;
                     "auto": parsed in rows, which are written for training, and plain in text,
                     which may only talk about it
    chats            None: with the model's own template
    end_of_text      whether rows of text end in one
    """

    special_tokens: str = "auto"
    chats: Chats | None = None
    end_of_text: bool = True

    @staticmethod
    def of(config: DataConfig, tokenizer: Tokenizer) -> Encoding:
        """As the settings say. Raises TemplateError as `Chats.of` does."""
        return Encoding(config.special_tokens, Chats.of(config, tokenizer), config.end_of_text)

    def parses(self, plain: bool) -> bool:
        """Whether names of special tokens are these tokens: in rows, or in plain text."""
        return self.special_tokens == "parse" or (self.special_tokens == "auto" and not plain)


AUTO = Encoding()
TEXT = "text"  # a note of `Document`: it is a row of text
ENDED = "ended"  # one that ends in the end of text


def encode(row: Row, tokenizer: Tokenizer, encoding: Encoding) -> Document:
    """The tokens of a row.

    Raises BadValue for a row of which no token can be learned, told with its place as others are.
    """
    if isinstance(row, ChatRow):
        document = encode_chat(row, tokenizer, encoding.chats)
    elif isinstance(row, TextRow):
        document = _text(row, tokenizer, encoding)
    elif isinstance(row, CompletionRow) and row.is_answer and encoding.chats is not None:
        document = encode_chat(_chat(row), tokenizer, encoding.chats)
    elif isinstance(row, CompletionRow):
        document = _completion(row, tokenizer, encoding.parses(plain=False))
    else:
        raise BadValue(f"is a {type(row).__name__}, which cannot be encoded")
    if isinstance(row, TextRow) and row.plain:
        return document
    check_learned(document)
    if row.weight == 1:
        return document
    learned = np.ones(len(document)) if document.trained is None else document.trained
    return replace(document, trained=np.asarray(learned * row.weight, np.float32))


def check_learned(document: Document) -> None:
    """BadValue for a document without a learned token that follows another."""
    if len(document) < 2 or (document.trained is not None and not document.trained[1:].any()):
        raise BadValue(
            "has no token to learn: the first of a text, which follows none, is not learned"
        )


def _with_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """With an end of text, if there is none at the end. BadValue if the vocabulary has none."""
    end = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.eot_id
    if end is None:
        raise BadValue(
            "has an end to learn, and the model's vocabulary no token that ends a text: its key "
            "tokenizer.ggml.eos_token_id names one (rows of text need none with --no-end-of-text)",
            says_all=True,
        )
    return ids if ids[-1:] in ([end], [tokenizer.eot_id]) else [*ids, end]


def _text(row: TextRow, tokenizer: Tokenizer, encoding: Encoding) -> Document:
    ids = whole(row.text, tokenizer, encoding.parses(row.plain))
    if row.plain:
        return Document(ids)
    ids = _with_end(ids, tokenizer) if encoding.end_of_text else ids
    is_ended = ids[-1:] in ([tokenizer.eos_id], [tokenizer.eot_id])
    return Document(ids, None, (TEXT, ENDED) if is_ended else (TEXT,))


def _chat(row: CompletionRow) -> ChatRow:
    """A question and its answer as messages."""
    roles = (("user", row.prompt), ("assistant", row.completion))
    messages = tuple({"role": role, "content": text} for role, text in roles)
    return ChatRow(row.place, messages, read_only=frozenset({0}))


def _completion(row: CompletionRow, tokenizer: Tokenizer, parse: bool) -> Document:
    """A token across the seam is learned; BOS, where the prompt is empty, is not."""
    ids = whole(row.prompt + row.completion, tokenizer, parse)
    prompt = whole(row.prompt, tokenizer, parse)
    same = zip(ids, prompt, strict=False)
    first = next((i for i, (a, b) in enumerate(same) if a != b), min(len(ids), len(prompt)))
    ids = _with_end(ids, tokenizer)
    return Document(ids, np.arange(len(ids)) >= first)
