"""Pieces of text → the API's objects, whole or as the chunks of a stream.

Chats and texts differ in where text and log-probabilities stand: each has a `ReplyForm`, that of
chats in chat_answers.
"""

import json
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from pyggml.cli.web.errors import ApiError
from pyggml.generation import Finish, Piece
from pyggml.generation.serving import ReadPrompt
from pyggml.tokenizer import Tokenizer

Object = dict[str, Any]
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class PartialAnswer:
    """One answer, as far as it has come.

    prefix     what stands before it: the prompt, where that is echoed
    reason     the API's finish_reason, once it has ended
    """

    prefix: str = ""
    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    n_tokens: int = 0
    reason: str | None = None

    @classmethod
    def of(cls, told: Piece | ReadPrompt | None, prefix: str = "") -> "PartialAnswer":
        """A part of a stream: a piece, what was read of the prompt, or the end of its time."""
        part = cls(text=prefix if isinstance(told, ReadPrompt) else "")
        part.add(told)
        return part

    def add(self, told: Piece | ReadPrompt | None) -> None:
        """A piece, what the model said of the prompt's own tokens, or the end of its time."""
        if isinstance(told, ReadPrompt):
            self.pieces += told.pieces
        elif told is not None:
            self.text += told.text
            if told.finish is not Finish.STOP_TOKEN:
                self.n_tokens += 1
                self.pieces += [told] if told.logprob is not None else []
        if told is None or told.finish is not None:
            self.reason = told.finish.reason if told and told.finish else "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request's prompts, how many of them were in the cache, and of its answers."""

    n_prompt: int
    n_cached: int
    n_answer: int

    def object(self) -> Object:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_answer,
            "total_tokens": self.n_prompt + self.n_answer,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }


class AnswerForm(ABC):
    """The objects of one request's answers, of the model of a name. done: what ends a stream."""

    model: str
    done = b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, choices: list[PartialAnswer], usage: Usage) -> Object: ...

    @abstractmethod
    def opening(self, index: int, prefix: str) -> list[Object]:
        """What comes before the first piece of an answer."""

    @abstractmethod
    def chunks(self, index: int, told: Piece | ReadPrompt | None, prefix: str = "") -> list[Object]:
        """Parts of answer `index`: of a piece, the prompt and what was read of it, or without
        either its end."""

    @abstractmethod
    def closing(self, usage: Usage, asked: bool) -> list[Object]:
        """What comes after all answers. asked: whether the usage is asked for."""

    def fault(self, error: ApiError) -> Object:
        return error.body()

    def event(self, part: Object) -> bytes:
        """Of a stream."""
        return f"data: {_written(part)}\n\n".encode()


class ReplyForm(AnswerForm):
    """The objects of chats and texts, all with the same id."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self.model, self._tokenizer = model, tokenizer
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[PartialAnswer], usage: Usage) -> Object:
        entries = [
            {"finish_reason": choice.reason} | self._choice(i, choice)
            for i, choice in enumerate(choices)
        ]
        return {**self._head, "object": self.kind, "choices": entries, "usage": usage.object()}

    def chunks(self, index: int, told: Piece | ReadPrompt | None, prefix: str = "") -> list[Object]:
        part = PartialAnswer.of(told, prefix)
        return [
            {**self._head, "object": self.chunk_kind, "choices": [delta]}
            for delta in self._deltas(index, part)
        ]

    def closing(self, usage: Usage, asked: bool) -> list[Object]:
        told = {"object": self.chunk_kind, "choices": [], "usage": usage.object()}
        return [{**self._head, **told}] if asked else []

    @abstractmethod
    def _choice(self, index: int, choice: PartialAnswer) -> Object: ...

    @abstractmethod
    def _deltas(self, index: int, part: PartialAnswer) -> list[Object]: ...

    def _text_of(self, token: int) -> str:
        return self._tokenizer.token_bytes(token, special=True).decode("utf-8", "replace")


class TextForm(ReplyForm):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(model, tokenizer)
        self._offsets: dict[int, int] = {}  # of each answer's next token, in a stream

    def opening(self, index: int, prefix: str) -> list[Object]:
        if not prefix:
            return []
        chunk = {"index": index, "text": prefix, "logprobs": None, "finish_reason": None}
        return [{**self._head, "object": self.chunk_kind, "choices": [chunk]}]

    def _choice(self, index: int, choice: PartialAnswer) -> Object:
        text = choice.prefix + choice.text
        return {"index": index, "text": text, "logprobs": self._logprobs(index, choice)}

    def _deltas(self, index: int, part: PartialAnswer) -> list[Object]:
        told = {"index": index, "text": part.text, "logprobs": self._logprobs(index, part)}
        return [told | {"finish_reason": part.reason}]

    def _logprobs(self, index: int, choice: PartialAnswer) -> Object | None:
        if not choice.pieces:
            return None
        names, offsets = [self._text_of(piece.token) for piece in choice.pieces], []
        text, start = choice.prefix + choice.text, self._offsets.get(index, 0)
        at = start
        for piece, name in zip(choice.pieces, names, strict=True):
            offsets.append(at)
            # A control token may not be in the text, such as the BOS of a prompt.
            if self._tokenizer.token_bytes(piece.token) or text.startswith(name, at - start):
                at += len(name)
        self._offsets[index] = at
        return {
            "tokens": names,
            "token_logprobs": [piece.logprob for piece in choice.pieces],
            "top_logprobs": [self._likeliest(piece) for piece in choice.pieces],
            "text_offset": offsets,
        }

    def _likeliest(self, piece: Piece) -> Object | None:
        """By text; of tokens with the same one, such as parts of characters, the likeliest. None of
        the first token of a prompt, of which nothing is predicted."""
        if piece.logprob is None:
            return None
        likeliest: Object = {}
        for token, p in piece.likeliest:
            likeliest.setdefault(self._text_of(token), p)
        return likeliest
