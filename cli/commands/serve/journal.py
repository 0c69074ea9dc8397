"""What a server has done: a line of JSON for each request, and the counts of /metrics."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyggml.cli.commands.serve.answers import Usage

_LOGGED = ("/v1/", "/tokenize", "/detokenize", "/props", "/slots", "/metrics")


@dataclass(frozen=True, slots=True)
class Cost:
    """What answers took. first: when their first token came, in time.monotonic()'s seconds;
    reasons: why they ended, None of those that were not finished."""

    model: str
    usage: Usage
    first: float | None
    reasons: Sequence[str | None]


@dataclass(slots=True)
class Entry:
    """A request as it goes on. holder: the number of its key; cost: tells what its answers took."""

    method: str
    path: str
    holder: int | None
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    cost: Callable[[], Cost] | None = None

    def line(self) -> dict[str, Any]:
        """Its line of the log: when it ended, how long it took, what it cost. No text of anyone."""
        now, cost = time.monotonic(), self.cost() if self.cost else None
        told: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "key": self.holder,
            "seconds": round(now - self.began, 3),
        }
        if cost is not None:
            told |= {
                "model": cost.model,
                "prompt_tokens": cost.usage.n_prompt,
                "cached_tokens": cost.usage.n_cached,
                "answer_tokens": cost.usage.n_answer,
                "finish": cost.reasons,
            }
            if cost.first is not None:
                told["first_token"] = round(cost.first - self.began, 3)
        return told


class Journal:
    """Counts requests, and tells a line of each. tell: takes lines; None: nobody wants them."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self._lock, self._counts = Lock(), defaultdict[tuple[str, str], float](float)
        self._tell = tell

    def note(self, entry: Entry) -> None:
        line = entry.line()
        with self._lock:
            self._counts["requests", f'path="{entry.path}",status="{entry.status}"'] += 1
            for name in ("prompt_tokens", "cached_tokens", "answer_tokens"):
                self._counts[name, ""] += line.get(name, 0)
            if "first_token" in line:
                self._counts["answered_requests", ""] += 1
                self._counts["first_token_seconds", ""] += line["first_token"]
                self._counts["answer_seconds", ""] += line["seconds"]
            if self._tell is not None:
                try:
                    self._tell(json.dumps(line))
                except OSError:  # nobody reads them any more
                    self._tell = None

    def metrics(self, gauges: dict[str, float]) -> str:
        """Prometheus' text format, 0.0.4. gauges: values of now, by name."""
        with self._lock:
            counts = sorted(self._counts.items())
        lines, names = list[str](), set[str]()
        for (name, labels), value in counts:
            full = f"pyggml_{name}_total"
            lines += [] if name in names else [f"# TYPE {full} counter"]
            names.add(name)
            lines.append(f"{full}{{{labels}}} {value:.15g}" if labels else f"{full} {value:.15g}")
        for name, value in gauges.items():
            lines += [f"# TYPE pyggml_{name} gauge", f"pyggml_{name} {value}"]
        return "\n".join(lines) + "\n"


class JournalMiddleware:
    """Notes requests when their answers have ended. An application finds the entry of a request as
    scope["state"]["entry"]. The page, its files and /health are none."""

    def __init__(self, app: ASGIApp, journal: Journal, paths: frozenset[str]) -> None:
        """paths: those there are; others are one, so that no stranger makes names of counts."""
        self.app, self.journal, self.paths = app, journal, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_LOGGED):
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        path = scope["path"] if scope["path"] in self.paths else "other"
        entry = state["entry"] = Entry(scope["method"], path, state.get("holder"))

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        finally:
            self.journal.note(entry)
        return None
