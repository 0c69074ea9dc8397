"""Answers of chats: what is said, thought and called, as the API has it."""

import secrets
from collections.abc import Callable
from typing import Any

from pyggml.chat.tools import AnswerReader, Said
from pyggml.cli.commands.serve.answers import Object, PartialAnswer, ReplyForm
from pyggml.generation import Piece
from pyggml.tokenizer import Tokenizer


class ChatForm(ReplyForm):
    """reader: makes what reads one answer."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, tokenizer: Tokenizer, reader: Callable[[], AnswerReader]
    ) -> None:
        super().__init__(model, tokenizer)
        self._reader = reader
        self._readers: dict[int, AnswerReader] = {}  # of each answer of a stream

    def opening(self, index: int, prefix: str) -> list[Object]:
        delta = {"role": "assistant", "content": ""}
        chunk = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self._head, "object": self.chunk_kind, "choices": [chunk]}]

    def _choice(self, index: int, choice: PartialAnswer) -> Object:
        reader = self._reader()
        message = _message([*reader.feed(choice.text), *reader.finish()])
        reason = _reason(reader, choice)
        told = {"index": index, "message": message, "logprobs": self._logprobs(choice)}
        return told | {"finish_reason": reason}

    def _deltas(self, index: int, part: PartialAnswer) -> list[Object]:
        reader = self._readers.setdefault(index, self._reader())
        said = reader.feed(part.text)
        if part.reason is not None:
            said += reader.finish()
        deltas = [_delta(each) for each in said] or ([{}] if part.pieces or part.reason else [])
        told: list[Object] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if told:
            told[0]["logprobs"] = self._logprobs(part)
            told[-1]["finish_reason"] = _reason(reader, part)
        return told

    def _logprobs(self, choice: PartialAnswer) -> Object | None:
        if not choice.pieces:
            return None
        entries = [token_entry(piece, self._tokenizer) for piece in choice.pieces]
        return {"content": entries, "refusal": None}


def token_entry(piece: Piece, tokenizer: Tokenizer) -> Object:
    """A token, its log-probability and those of the likeliest."""

    def entry(token: int, logprob: float | None) -> Object:
        raw = tokenizer.token_bytes(token, special=True)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    likeliest = [entry(token, p) for token, p in piece.likeliest]
    return entry(piece.token, piece.logprob) | {"top_logprobs": likeliest}


def _reason(reader: AnswerReader, part: PartialAnswer) -> str | None:
    return "tool_calls" if part.reason == "stop" and reader.n_calls else part.reason


def _delta(said: Said) -> Object:
    """What a part of an answer adds to a message."""
    if said.call is None:
        return (
            {"reasoning_content": said.reasoning} if said.reasoning else {"content": said.content}
        )
    call: Object = {"index": said.call, "function": {"arguments": said.arguments}}
    if said.name:
        call = {"id": call_id(), "type": "function", **call}
        call["function"] = {"name": said.name, "arguments": said.arguments}
    return {"tool_calls": [call]}


def call_id() -> str:
    """Of a call: nine letters and digits, which Mistral's templates want."""
    return secrets.token_hex(5)[:9]


def _message(said: list[Said]) -> Object:
    """A whole answer."""
    content = "".join(part.content for part in said)
    reasoning = "".join(part.reasoning for part in said)
    calls = list[dict[str, Any]]()
    for part in said:
        if part.call is not None and part.name:
            calls.append(
                {
                    "id": call_id(),
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
            )
        if part.call is not None:
            calls[-1]["function"]["arguments"] += part.arguments
    message: Object = {"role": "assistant", "content": content or (None if calls else "")}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
