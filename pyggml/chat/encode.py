"""A chat → its tokens, and which of them are learned.

The rendered text is tokenised as a whole, so the tokens are those that a model reads in use. One is
learned if it has a character of an answer, or ends it. Control tokens are parsed where the template
writes them; their names in a message are plain text, unless `parse` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pyggml.chat.answers import ASSISTANT, AnswerSpan, find_answers, open_end
from pyggml.chat.marks import MARK
from pyggml.chat.template import HAVE_PLACE, ChatTemplate, Message, Tools
from pyggml.chat.words import ALPACA, check_words
from pyggml.errors import TemplateError
from pyggml.tokenizer import Tokenizer

TRAIN_ON = ("assistant", "all")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedChat:
    """A chat as a model reads it.

    text       the template's output
    ids        its tokens, with BOS where the tokenizer adds one
    offsets    (n, 2) int64, the range of characters of each token
    trained    (n,) bool, whether each token is learned
    n_open     how many answers are learned without a token that ends them
    names      the control tokens whose names occur in messages as plain text
    n_thoughts how many thoughts of earlier turns the template takes out
    """

    text: str
    ids: list[int]
    offsets: np.ndarray
    trained: np.ndarray
    n_open: int
    names: frozenset[str]
    n_thoughts: int = 0


class ChatEncoder:
    """A template and a tokenizer.

    train_on   "assistant": its answers and the token that ends each; "all": every token
    parse      whether names of control tokens in messages become these tokens
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        train_on: str = ASSISTANT,
        parse: bool = False,
    ) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.train_on, self.parse = train_on, parse
        names = "|".join(map(re.escape, tokenizer.control_names()))
        self._names = re.compile(names or "(?!)")

    def __call__(
        self, messages: Sequence[Message], tools: Tools = None, read_only: Collection[int] = ()
    ) -> EncodedChat:
        """The tokens of a chat. read_only: indices of assistant messages that are not learned.

        For train_on "assistant" the chat ends with its last answer: nothing after it is learned.
        Raises TemplateError for messages that the template refuses or drops, and if it is not
        exactly known which tokens are the assistant's.
        """
        self._check_places(messages, tools)
        messages = self._in_its_parts(messages)
        learned = list[tuple[int, AnswerSpan]]()
        if self.train_on == ASSISTANT:
            numbers = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT]
            if not set(numbers) - set(read_only):
                raise TemplateError("has no message of the assistant that is to be learned")
            messages = messages[: numbers[-1] + 1]
            text, answers = find_answers(self.template, messages, tools)
            learned = [(i, answer) for i, answer in answers if i not in read_only]
        else:
            text = self.template.render(messages, tools)
        plain, names = ([], frozenset[str]()) if self.parse else self._plain(messages, tools, text)
        n_thoughts = check_words(self.template, messages, tools, text, asks=False)
        ids, offsets = self._tokens(text, plain)
        trained = np.full(len(ids), self.train_on != ASSISTANT)
        # Of an answer in several parts the last one has its end.
        ended = {i: self._learn(answer, ids, offsets, trained) for i, answer in learned}
        if not trained.any():
            raise TemplateError("has no token to be learned")
        n_open = [*ended.values()].count(False)
        return EncodedChat(text, ids, offsets, trained, n_open, names, n_thoughts)

    def with_names(self, names: Mapping[str, Any]) -> ChatEncoder:
        """The same with further inputs of the template, as its `with_names` has them."""
        if not names:
            return self
        template = self.template.with_names(names)
        return ChatEncoder(template, self.tokenizer, self.train_on, self.parse)

    def prompt(
        self, messages: Sequence[Message], tools: Tools = None, continues: bool = False
    ) -> list[int]:
        """The tokens of a chat up to where the assistant's next answer begins.

        continues: up to the last word of the last message instead, which the assistant began

        Raises TemplateError for messages that the template refuses or drops, and for a last message
        that cannot be continued.
        """
        self._check_places(messages, tools)
        messages = self._in_its_parts(messages)
        if continues:
            text, end = open_end(self.template, messages, tools)
        else:
            text = self.template.render(messages, tools, add_generation_prompt=True)
            end = len(text)
        plain = [] if self.parse else self._plain(messages, tools, text, not continues)[0]
        check_words(self.template, messages, tools, text, asks=not continues)
        within = [(start, stop) for start, stop in plain if stop <= end]
        return self._tokens(text[:end], within)[0]

    def _in_its_parts(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with Alpaca's names only if the template asks for them."""
        if f".{ALPACA[0]}" in self.template.source:
            return [*messages]
        return [
            {k: v for k, v in m.items() if k not in ALPACA} if ALPACA[0] in m else m
            for m in messages
        ]

    def _check_places(self, messages: Sequence[Message], tools: Tools) -> None:
        """TemplateError if the chat uses tools and the template has no place for them."""
        template = self.template.for_tools(tools)
        if tools and "tools" not in template.reads:
            raise TemplateError(
                f"has tools, for which {template.origin} has no place; {HAVE_PLACE}"
            )
        if any(m.get("tool_calls") for m in messages) and "tool_calls" not in template.source:
            fault = f"calls tools, for which {template.origin} has no place; {HAVE_PLACE}"
            raise TemplateError(fault)

    def _tokens(self, text: str, plain: Sequence[tuple[int, int]]) -> tuple[list[int], np.ndarray]:
        """Token ids and their characters; one BOS comes first where the tokenizer adds it."""
        ids, offsets = self.tokenizer.encode_with_offsets(text, plain)
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids, offsets = [bos, *ids], np.concatenate([np.zeros((1, 2), np.int64), offsets])
        if bos is not None and ids[:2] == [bos, bos]:
            raise TemplateError(f"{self.template.origin}: begins the text with two BOS tokens")
        return ids, offsets

    def _learn(
        self, answer: AnswerSpan, ids: list[int], offsets: np.ndarray, trained: np.ndarray
    ) -> bool:
        """Mark an answer's tokens in `trained`; returns whether one of them ends a turn."""
        inside = (offsets[:, 0] < answer.end) & (offsets[:, 1] > answer.start)
        trained |= inside
        if any(self.tokenizer.is_eog(ids[i]) for i in np.flatnonzero(inside)[-1:]):
            return True
        behind = (offsets[:, 0] >= answer.end) & (offsets[:, 1] <= answer.limit)
        for i in np.flatnonzero(behind):
            if self.tokenizer.is_eog(ids[i]):
                trained[(offsets[:, 0] >= answer.end) & (offsets[:, 0] <= offsets[i, 0])] = True
                return True
        trained[behind] |= answer.is_open
        return False

    def _plain(
        self, messages: Sequence[Message], tools: Tools, text: str, opens_answer: bool = False
    ) -> tuple[list[tuple[int, int]], frozenset[str]]:
        """Where names of control tokens stand in messages, not as the template's own; which."""
        tokens = set[str]()

        def mark(value: str) -> str:
            if MARK in value:
                raise TemplateError("a message has U+FDD2, which is no character")
            tokens.update(self._names.findall(value))
            return self._names.sub(lambda name: MARK + name[0], value)

        marked = [_map(mark, message) for message in messages]
        marked_tools = [_map(mark, tool) for tool in tools or ()]
        if not tokens:
            return [], frozenset()
        rendered = self.template.render(marked, marked_tools, add_generation_prompt=opens_answer)
        parts = rendered.split(MARK)
        if "".join(parts) != text:
            raise TemplateError(
                f"{self.template.origin}: changes messages around {' and '.join(sorted(tokens))}, "
                "which may be text there or a token"
            )
        ranges, at = [], 0
        for part, following in pairwise(parts):
            at += len(part)
            name = self._names.match(following)
            ranges.append((at, at + len(name[0] if name else "")))
        return ranges, frozenset(tokens)


def _map(change: Callable[[str], str], value: Any) -> Any:
    """A copy of a value with all strings changed but names and roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: v if k == "role" else _map(change, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map(change, item) for item in value]
    return value
