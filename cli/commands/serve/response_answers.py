"""Answers of /v1/responses: thoughts, texts and calls as items, whole or as events."""

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from pyggml.chat.tools import AnswerReader, Said
from pyggml.cli.commands.serve.answers import AnswerForm, Object, PartialAnswer, Usage
from pyggml.cli.commands.serve.chat_answers import call_id, token_entry
from pyggml.cli.web.errors import ApiError
from pyggml.generation import Piece
from pyggml.generation.serving import ReadPrompt
from pyggml.tokenizer import Tokenizer

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # an item's part of text
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """Parts of an answer → items, and the events of a stream that tells them.

    items   as far as they have come; the last one may be open
    """

    def __init__(self) -> None:
        self.items = list[Object]()
        self._is_open = False
        self._call: int | None = None
        self._logprobs = list[Object]()  # of tokens whose text has not come yet

    def add(self, said: list[Said], logprobs: list[Object]) -> list[Object]:
        events = list[Object]()
        self._logprobs += logprobs
        for part in said:
            if part.call is not None:
                events += self._add_call(part)
            elif part.reasoning:
                events += self._add_text("reasoning", part.reasoning)
            elif part.content:
                events += self._add_text("message", part.content)
        return events

    def finish(self, status: str) -> list[Object]:
        """The end of an answer, which has an item at least."""
        events = [] if self.items else self._open("message")
        if self._logprobs and self.items[-1]["type"] == "message":
            self.items[-1]["content"][0]["logprobs"] += self._logprobs
        return events + self._close(status)

    def _add_text(self, kind: str, text: str) -> list[Object]:
        is_new = not self._is_open or self.items[-1]["type"] != kind
        events = self._open(kind) if is_new else []
        part, logprobs = self.items[-1]["content"][0], list[Object]()
        part["text"] += text
        delta: Object = {"content_index": 0, "delta": text}
        if kind == "message":
            logprobs, self._logprobs = self._logprobs, []
            part["logprobs"] += logprobs
            delta["logprobs"] = logprobs
        return [*events, self._event(f"response.{_PARTS[kind]}.delta", **delta)]

    def _add_call(self, said: Said) -> list[Object]:
        events = list[Object]()
        if said.name or said.call != self._call:
            self._call = said.call
            named = {"call_id": call_id(), "name": said.name, "arguments": ""}
            events = self._open("function_call", **named)
        self.items[-1]["arguments"] += said.arguments
        if said.arguments:
            kind = "response.function_call_arguments.delta"
            events.append(self._event(kind, delta=said.arguments))
        return events

    def _open(self, kind: str, **named: Any) -> list[Object]:
        events = self._close("completed")
        item: Object = {"type": kind, "id": _id(_PREFIXES[kind]), "status": "in_progress", **named}
        if kind == "message":
            item["role"] = "assistant"
        if kind == "reasoning":
            item["summary"] = []
        empty = item if kind == "function_call" else {**item, "content": []}
        self.items.append(item)
        self._is_open = True
        events.append(self._event("response.output_item.added", id=False, item={**empty}))
        if kind in _PARTS:
            part: Object = {"type": _PARTS[kind], "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            item["content"] = [part]
            told = self._event("response.content_part.added", content_index=0, part={**part})
            events.append(told)
        return events

    def _close(self, status: str) -> list[Object]:
        if not self._is_open:
            return []
        self._is_open, item = False, self.items[-1]
        item["status"], kind = status, item["type"]
        if kind == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **told)]
        else:
            part = item["content"][0]
            told = {"text": part["text"], "content_index": 0}
            told |= {"logprobs": part["logprobs"]} if kind == "message" else {}
            events = [
                self._event(f"response.{part['type']}.done", **told),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._event("response.output_item.done", id=False, item=item)]

    def _event(self, kind: str, id: bool = True, **told: Any) -> Object:
        """Of the last item. id: whether the item is named."""
        name = {"item_id": self.items[-1]["id"]} if id else {}
        return {"type": kind, **name, "output_index": len(self.items) - 1, **told}


class ResponseForm(AnswerForm):
    """reader: makes what reads the answer. echo: what is said of the request, a JSON object."""

    done = b""

    def __init__(
        self, model: str, tokenizer: Tokenizer, reader: Callable[[], AnswerReader], echo: str
    ) -> None:
        self.model, self._tokenizer, self._reader, self._echo = model, tokenizer, reader(), echo
        self._head = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
        self._items, self._n_events = OutputItems(), 0
        self._reason: str | None = None

    def whole(self, choices: list[PartialAnswer], usage: Usage) -> Object:
        self._add(choices[0])
        return self._response(usage)

    def opening(self, index: int, prefix: str) -> list[Object]:
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._response(None)} for kind in kinds])

    def chunks(self, index: int, told: Piece | ReadPrompt | None, prefix: str = "") -> list[Object]:
        return self._numbered(self._add(PartialAnswer.of(told)))

    def closing(self, usage: Usage, asked: bool) -> list[Object]:
        response = self._response(usage)
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def fault(self, error: ApiError) -> Object:
        about = {"code": error.code, "message": error.message, "param": error.param}
        return self._numbered([{"type": "error", **about}])[0]

    def event(self, part: Object) -> bytes:
        return f"event: {part['type']}\n".encode() + super().event(part)

    def _add(self, part: PartialAnswer) -> list[Object]:
        said = self._reader.feed(part.text)
        if part.reason is not None:
            said += self._reader.finish()
            self._reason = part.reason
        tokens = [token_entry(piece, self._tokenizer) for piece in part.pieces]
        events = self._items.add(said, tokens)
        return events + (self._items.finish(self._status) if part.reason is not None else [])

    @property
    def _status(self) -> str:
        if self._reason is None:
            return "in_progress"
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, usage: Usage | None) -> Object:
        is_cut = self._status == "incomplete"
        response = {**self._head, "model": self.model, "status": self._status, "error": None}
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["output"] = self._items.items
        response["usage"] = None if usage is None else self._usage(usage)
        return {**json.loads(self._echo), **response}

    def _usage(self, usage: Usage) -> Object:
        """The tokens of a thought are those of its text."""
        thoughts = [item for item in self._items.items if item["type"] == "reasoning"]
        texts = [item["content"][0]["text"] for item in thoughts]
        n_thought = sum(len(self._tokenizer.encode(text, add_special=False)) for text in texts)
        cached = {"cached_tokens": usage.n_cached, "cache_write_tokens": 0}
        return {
            "input_tokens": usage.n_prompt,
            "input_tokens_details": cached,
            "output_tokens": usage.n_answer,
            "output_tokens_details": {"reasoning_tokens": min(n_thought, usage.n_answer)},
            "total_tokens": usage.n_prompt + usage.n_answer,
        }

    def _numbered(self, events: list[Object]) -> list[Object]:
        """Events with their numbers."""
        first = self._n_events
        self._n_events += len(events)
        return [{**event, "sequence_number": first + i} for i, event in enumerate(events)]


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
