"""An answer as it comes → what is thought, what is said, and which tools are called.

Nothing that a model writes is an error. What looks like a call and is none is content. Text waits
while it may be a part of a mark; arguments that are JSON are passed on as they come.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.chat.tools.syntax import CallSyntax
from pyggml.chat.tools.thoughts import Thought
from pyggml.chat.tools.values import Unfinished

_MOST_HEAD = 512  # characters from a mark to arguments
_DECODER = json.JSONDecoder(strict=False)  # models write new lines into strings
_NAMES, _ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")
_FIRST_KEYS = (*_NAMES, *_ARGUMENTS, "type", "id", "tool_call_id")


@dataclass(frozen=True, slots=True)
class Said:
    """A part of an answer. call: the number of the call that a name or arguments are of."""

    reasoning: str = ""
    content: str = ""
    call: int | None = None
    name: str = ""
    arguments: str = ""


class AnswerReader:
    """Reads one answer."""

    def __init__(
        self,
        syntax: CallSyntax | None,
        tools: Sequence[Mapping[str, Any]] = (),
        thought: Thought | None = None,
        is_open: bool = False,
        calls_alone: bool = False,
    ) -> None:
        """syntax: None reads no calls. thought: its marks, if there may be one. is_open: whether
        the prompt has begun it. calls_alone: whether a grammar holds the answer to calls, so that a
        beginning of one, where the answer was cut off, is no content."""
        self._syntax, self._thought, self._calls_alone = syntax, thought, calls_alone
        self._schemas = {t["function"]["name"]: t["function"].get("parameters") for t in tools}
        bare = [f"{syntax.bare}{name}(" for name in self._schemas] if syntax and syntax.bare else []
        self._marks = (*syntax.marks, *bare) if syntax else ()
        self._frames = tuple(thought.frames) if thought else ()
        self._text, self._space, self._said = "", "", list[Said]()
        self._step: Callable[[bool], bool] = self._think if is_open else self._talk
        self._begins, self._trims = True, is_open
        self.n_calls = 0
        self._scan = _JsonScan()

    def feed(self, text: str) -> list[Said]:
        """What this text completes."""
        self._text += text
        while self._step(False):
            pass
        said, self._said = self._said, []
        return said

    def finish(self) -> list[Said]:
        """What waited: the answer has ended."""
        while self._text and self._step(True):
            pass
        if self._space and not self.n_calls and self._step == self._talk:
            self._content(self._space)
        said, self._said = self._said, []
        return said

    # -- thoughts and content -------------------------------------------------------------------

    def _think(self, is_last: bool) -> bool:
        """Inside a thought. A call in it is one if the answer ends before the thought does."""
        assert self._thought is not None
        end = self._text.find(self._thought.close)
        if end >= 0:
            self._reason(self._text[:end])
            self._text = self._text[end + len(self._thought.close) :]
            return self._turn(self._talk, begins=True)
        call, _ = self._first(self._marks)
        if call >= 0:
            self._reason(self._text[:call])
            self._text = self._text[call:]
            return self._turn(self._head) if is_last else False
        until = len(self._text)
        if not is_last:
            until = _possible(self._text, (self._thought.close, *self._marks))
        self._reason(self._text[:until])
        self._text = self._text[until:]
        return False

    def _talk(self, is_last: bool) -> bool:
        """In the content."""
        if self._begins and (step := self._begin(is_last)) is not None:
            return step
        at, mark = self._first((*self._marks, *self._frames))
        if at >= 0:
            self._tell(self._text[:at])
            self._text = self._text[at:]
            if mark in self._marks:
                return self._turn(self._head)
            self._text = self._text[len(mark) :]
            return self._turn(self._talk, begins=True)
        until = len(self._text)
        if not is_last:
            until = _possible(self._text, (*self._marks, *self._frames))
        self._tell(self._text[:until])
        self._text = self._text[until:]
        return False

    def _begin(self, is_last: bool) -> bool | None:
        """Where an answer begins, or goes on after a thought or a call; None: with content."""
        rest = self._text.lstrip()
        if self._thought:
            opening = self._thought.open.strip()
            if rest.startswith(opening):
                self._text = rest[len(opening) :]
                self._step, self._trims, self._space = self._think, True, ""
                return True
            if opening.startswith(rest) and not is_last:
                return False
        is_bare = self._syntax is not None and self._syntax.is_bare
        if is_bare and rest.startswith("{"):
            self._text = rest
            return self._turn(self._head)
        if not rest and not is_last and (is_bare or self._trims):
            return False
        if rest:
            self._begins = False
        return None

    def _turn(self, step: Callable[[bool], bool], begins: bool = False) -> bool:
        self._step, self._begins = step, begins
        self._trims = self._trims or begins
        if begins:
            self._space = ""
        return True

    def _first(self, marks: Sequence[str]) -> tuple[int, str]:
        """The first of the marks in the text, and where; the longest of several there."""
        places = [(at, -len(m), m) for m in marks if (at := self._text.find(m)) >= 0]
        at, _, mark = min(places, default=(-1, 0, ""))
        return at, mark

    def _reason(self, text: str) -> None:
        text = self._spaced(text)
        if text:
            self._said.append(Said(reasoning=text))

    def _tell(self, text: str) -> None:
        self._content(self._spaced(text))

    def _content(self, text: str) -> None:
        if text and not self._calls_alone:
            self._said.append(Said(content=text))

    def _spaced(self, text: str) -> str:
        """The text without white space at its end, which waits, and at its beginning where what
        stands before is no content."""
        text, self._space = self._space + text, ""
        if self._trims:
            text = text.lstrip()
        if not self._marks and not self._thought:
            return text
        said = text.rstrip()
        if said:
            self._trims = False
        self._space = text[len(said) :]
        return said

    # -- calls ----------------------------------------------------------------------------------

    def _head(self, is_last: bool) -> bool:
        """At a mark, or an object that may be a call."""
        assert self._syntax is not None
        head = self._syntax.start.match(self._text)
        if head and self._may_call(head["name"]):
            return self._open(head["name"], self._text[head.end() :])
        if head is None and self._syntax.keys and (step := self._whole(is_last)) is not None:
            return step
        return self._reject() if head or is_last or len(self._text) > _MOST_HEAD else False

    @property
    def _is_marked(self) -> bool:
        assert self._syntax is not None
        return not self._syntax.is_bare or self._text.startswith(self._marks)

    def _may_call(self, name: str) -> bool:
        """An object without a mark is a call if there is such a tool; else it may be an answer."""
        return self._is_marked or name in self._schemas

    def _open(self, name: str, rest: str) -> bool:
        assert self._syntax is not None
        if self._syntax.notation is None:
            self._said.append(Said(call=self.n_calls, name=name))
            self._scan, self._step = _JsonScan(), self._pass_json
        else:
            self._name, self._step = name, self._read_values
        self._text = rest
        return True

    def _pass_json(self, is_last: bool) -> bool:
        """In the arguments, which are JSON."""
        end = self._scan.end(self._text, 0)
        part = self._text[: len(self._text) if end is None else end]
        if part:
            self._said.append(Said(call=self.n_calls, arguments=part))
        self._text = self._text[len(part) :]
        if end is None:
            return False
        assert self._syntax is not None
        self._scan.depth = 1
        return self._close(self._skip if self._syntax.keys else self._behind)

    def _skip(self, is_last: bool) -> bool:
        """In the rest of a call's object, such as its id."""
        end = self._scan.end(self._text, 0)
        self._text = "" if end is None else self._text[end:]
        self._step = self._skip if end is None else self._behind
        return end is not None

    def _read_values(self, is_last: bool) -> bool:
        """In arguments that are no JSON: told when all are there."""
        assert self._syntax is not None and self._syntax.notation is not None
        schema = self._schemas.get(self._name) or {}
        try:
            values, end = self._syntax.notation.read(self._text, 0, schema)
        except Unfinished:
            if not is_last:
                return False
            values, end = None, 0
        except ValueError:
            return self._pass_broken(is_last)
        if values is None:  # told as it is: a call that broke off has arguments that are none
            self._call(self._name, self._text.strip())
            self._text = ""
        else:
            self._call(self._name, json.dumps(values, ensure_ascii=False))
            self._text = self._text[end:]
        return self._close(self._behind)

    def _pass_broken(self, is_last: bool) -> bool:
        """Tell arguments that are none as they are, up to the mark that ends a call."""
        assert self._syntax is not None
        mark = (self._syntax.after or self._syntax.closing).split()[-1]
        broken, end, rest = self._text.partition(mark)
        if not end and not is_last:
            return False
        self._call(self._name, broken.strip())
        self._text = rest
        return self._close(self._behind)

    def _whole(self, is_last: bool) -> bool | None:
        """A call whose object has its fields in another order, or arguments as text: told when it
        is complete. None if it is none."""
        assert self._syntax is not None
        lead = self._syntax.lead.match(self._text)
        at = lead.end() if lead else 0
        if not self._text.startswith("{", at):
            return None
        key = self._text[at + 1 : at + 64].lstrip()
        names = tuple(f'"{name}"' for name in _FIRST_KEYS)
        if not key.startswith(names) and not any(name.startswith(key) for name in names):
            return None
        try:
            value, end = _DECODER.raw_decode(self._text, at)
        except (ValueError, RecursionError):
            return None if is_last else False
        call = _call_of(value)
        if call is None or not self._may_call(call[0]):
            return None if len(self._text) == end and not is_last else self._reject()
        self._call(*call)
        self._text = self._text[end:]
        return self._close(self._behind)

    def _call(self, name: str, arguments: str) -> None:
        self._said.append(Said(call=self.n_calls, name=name))
        self._said.append(Said(call=self.n_calls, arguments=arguments))

    def _close(self, step: Callable[[bool], bool]) -> bool:
        self.n_calls += 1
        self._step = step
        return True

    def _behind(self, is_last: bool) -> bool:
        """Behind a call: its end, another one, or content."""
        assert self._syntax is not None
        rest = self._text.lstrip()
        end = next((end for end in self._syntax.ends if rest.startswith(end)), None)
        longer = any(e.startswith(rest) for e in (*self._syntax.ends, *self._marks))
        if longer and not is_last and rest != end:
            return False
        if end is not None:
            self._text = rest[len(end) :]
            is_further = self._syntax.opening and end == self._syntax.between.strip()
            return self._turn(self._head) if is_further else True
        self._text = rest
        if rest.startswith(self._marks) or (
            self._syntax.is_list and self._syntax.start.match(rest)
        ):
            return self._turn(self._head)
        self._trims = True
        return self._turn(self._talk, begins=True)

    def _reject(self) -> bool:
        """It is no call: content, as far as a mark might begin again."""
        _, mark = self._first(self._marks)
        n = len(mark) or 1
        self._tell(self._text[:n])
        self._text = self._text[n:]
        return self._turn(self._talk)


@dataclass(slots=True)
class _JsonScan:
    """A place in the text of an object. depth: of braces and brackets that are open."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def end(self, text: str, at: int) -> int | None:
        """Where the object ends that began in this text or before; None if it goes on."""
        for i in range(at, len(text)):
            character = text[i]
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped = character == "\\"
                self.in_string = character != '"'
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return i + 1
        return None


def _call_of(value: Any) -> tuple[str, str] | None:
    """The name and arguments of a call's object; None if it is none."""
    if not isinstance(value, dict):
        return None
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name = next((value[key] for key in _NAMES if key in value), None)
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _possible(text: str, marks: Sequence[str]) -> int:
    """Where the first mark begins that the text may go on to complete."""
    longest = max(map(len, marks), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)


def calls_in(
    text: str, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in a whole text; arguments that are no JSON stay text."""
    reader = AnswerReader(syntax, tools)
    calls = list[list[str]]()
    # Templates write headings before an answer: only a call without a mark must be the first.
    start = text.find("{") if syntax.is_bare else 0
    for said in [*reader.feed(text[max(0, start) :]), *reader.finish()]:
        if said.call is not None:
            calls += [[said.name, ""]] if said.name else []
            calls[-1][1] += said.arguments
    return [(name, _loads(arguments)) for name, arguments in calls]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
