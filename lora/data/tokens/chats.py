"""Chats → tokens, with the assistant's marked as learned. See `pyggml.chat`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

import numpy as np

from pyggml.chat import (
    MODEL,
    TOOL_USE,
    ChatEncoder,
    ChatTemplate,
    Message,
    find_template,
    read_names,
    template_metadata,
)
from pyggml.chat.messages import BadValue, Weights
from pyggml.errors import TemplateError, TokenizerError
from pyggml.lora.config import DataConfig
from pyggml.lora.data.records.rows import ChatRow
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.windows.batches import Corpus
from pyggml.model import Model
from pyggml.tokenizer import Tokenizer

# What may be said of a chat besides its tokens.
CHAT = "chat"  # it is one
CUT = "cut"  # its first rounds were left out, so that the rest fits into a window
NAMED = "named"  # names of control tokens stand in its messages, as plain text
THOUGHTS = "thoughts"  # the template takes thoughts out of earlier turns
OPEN = "open"  # an answer is learned without a token that ends it


@dataclass(frozen=True, slots=True)
class Chats:
    """How chats become tokens.

    source, origin   the template's Jinja2, and its name in errors
    train_on         "assistant" or "all", see `pyggml.chat.ChatEncoder`
    today            the date for templates that ask for one, as YYYY-MM-DD
    parse            whether names of control tokens in messages become these tokens
    most             the most tokens of a chat; longer ones lose their first rounds. 0: any number
    names            further inputs of the template, a JSON object
    with_tools       the text of the template for chats with tools; "" if it is the same
    """

    source: str
    origin: str
    train_on: str = "assistant"
    today: str = "2025-01-01"
    parse: bool = False
    most: int = 0
    with_tools: str = ""
    names: str = ""

    @staticmethod
    def of(config: DataConfig, tokenizer: Tokenizer) -> Chats | None:
        """From settings; None if the model's own template is wanted and it has none.

        Raises TemplateError for a template that does not exist or is not Jinja2.
        """
        if config.chat_template == MODEL and not tokenizer.chat_templates:
            return None
        names = config.chat_template_kwargs or ""
        template = find_template(tokenizer, config.chat_template, names=names)
        return Chats(
            template.source,
            template.origin,
            config.train_on,
            config.chat_date,
            config.special_tokens == "parse",
            config.ctx + 1 if config.long_chats == "cut" else 0,
            template.tool_use.source if template.tool_use else "",
            json.dumps(template.names, ensure_ascii=False) if template.names else "",
        )


def chat_metadata(corpus: Corpus, model: Model) -> dict[str, str | None]:
    """The keys by which a file carries the template of the chats in a corpus; none without chats,
    or for a model without a vocabulary, whose chats another one wrote.

    None: the file is to lack that key.
    """
    template = corpus.about.get("chat_template")
    if template is None or not any(CHAT in source.notes for source in corpus.files):
        return {}
    names = corpus.about.get("chat_template_kwargs") or ""
    try:
        return template_metadata(find_template(model.tokenizer, template, names=names))
    except TokenizerError:
        return {}


def encode_chat(row: ChatRow, tokenizer: Tokenizer, chats: Chats | None) -> Document:
    """The tokens of a chat.

    Raises BadValue for messages that the template refuses, or if the learned tokens cannot be told
    from others. Raises TemplateError if there is no template.
    """
    encoder = encoder_of(tokenizer, chats)
    _check_weights(row, encoder.train_on)
    messages, read_only, weights = [*row.messages], row.read_only, row.weights
    try:
        chat = encoder(messages, row.tools, read_only)
        n_left_out, most = 0, chats.most if chats else 0
        while most and len(chat.ids) > most and (n := first_round(messages)):
            kept = [i for i in range(len(messages)) if i not in n]
            rest = [messages[i] for i in kept]
            learned = frozenset(new for new, old in enumerate(kept) if old in read_only)
            if not _is_learned(rest, learned):
                break
            weights = {new: weights[old] for new, old in enumerate(kept) if old in weights}
            messages, read_only, n_left_out = rest, learned, n_left_out + len(n)
            chat = encoder(messages, row.tools, read_only)
        trained = _weigh(encoder, messages, row.tools, read_only, weights, chat.trained)
    except TemplateError as error:
        raise BadValue(f"{error}{_way_out(row, encoder)}", joint=": ") from None
    said = {CUT: n_left_out, NAMED: chat.names, THOUGHTS: chat.n_thoughts, OPEN: chat.n_open}
    return Document(chat.ids, trained, (CHAT, *(note for note, there in said.items() if there)))


def _way_out(row: ChatRow, encoder: ChatEncoder) -> str:
    """What learns a chat that is refused, as the end of a sentence; "" if nothing does."""
    if encoder.train_on == "all":
        return ""
    learner = ChatEncoder(encoder.template, encoder.tokenizer, "all", encoder.parse)
    try:
        learner(row.messages, row.tools)
    except TemplateError:
        return ""
    return "; --train-on all learns every token of it"


def _check_weights(row: ChatRow, train_on: str) -> None:
    """BadValue for a message whose weight is not how the settings learn it."""
    for i, weight in row.weights.items():
        is_answer = row.messages[i]["role"] == "assistant"
        if train_on == "all" and weight != 1:
            fault = f"of the weight {weight:g}, and --train-on all learns every token"
        elif train_on != "all" and weight and not is_answer:
            fault = 'with "train" or "weight" and not of the assistant, whose alone are learned'
        else:
            continue
        raise BadValue(f"has a message {i + 1} {fault}", says_all=True)


def _weigh(
    encoder: ChatEncoder,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    read_only: frozenset[int],
    weights: Weights,
    trained: np.ndarray,
) -> np.ndarray:
    """What is learned, by shares where messages have a weight that is neither 0 nor 1."""
    shares = trained
    for weight in sorted({w for w in weights.values() if 0 < w < 1}):
        elsewhere = {i for i in range(len(messages)) if weights.get(i) != weight}
        part = encoder(messages, tools, read_only | elsewhere).trained
        shares = np.where(part, np.float32(weight), shares).astype(np.float32)
    return shares


@lru_cache(maxsize=4)
def encoder_of(tokenizer: Tokenizer, chats: Chats | None) -> ChatEncoder:
    """None: with the model's own template. Raises TemplateError if there is none."""
    if chats is None:
        return ChatEncoder(find_template(tokenizer), tokenizer)
    today = date.fromisoformat(chats.today)
    names = tokenizer.special_texts()
    tool_use = None
    if chats.with_tools:
        origin = f"the model's chat template {TOOL_USE}"
        tool_use = ChatTemplate(chats.with_tools, origin, names, today)
    template = ChatTemplate(chats.source, chats.origin, names, today, tool_use)
    template = template.with_names(read_names(chats.names))
    return ChatEncoder(template, tokenizer, chats.train_on, chats.parse)


def first_round(messages: Sequence[Message]) -> range:
    """The indices of the first round: from the first message to before the user's second one.

    System messages at the start are not part of it. Empty if the user has only one message.
    """
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    first = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), 0)
    return range(first, users[1]) if len(users) > 1 else range(0)


def _is_learned(messages: Sequence[Message], read_only: frozenset[int]) -> bool:
    return any(m["role"] == "assistant" for i, m in enumerate(messages) if i not in read_only)
