"""A chat template: messages → the text that a model reads.

`messages` and `tools` are as the OpenAI API has them. Names whose value is None are left out, and
reasoning is given under all its names, as transformers does before it renders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import date, datetime
from functools import cached_property
from typing import Any

from pyggml.chat import limits
from pyggml.chat.calls import AS_GIVEN, FORMS, Form
from pyggml.chat.marks import CLOSE, MARKING, OPEN
from pyggml.errors import TemplateError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
MOST_SOURCE = 1 << 16  # characters; to compile that takes 200 MB where each is a number
REASONING = ("reasoning_content", "thinking", "reasoning")
_OWN = ("messages", "tools", "documents", "add_generation_prompt")
_DEEPEST = 64  # of lists and objects in a message
_DEVELOPER, _SYSTEM = "developer", "system"  # OpenAI's newer name for the role, and the older one
# Built-in templates with a place for tools, calls and thoughts, for whoever's has none.
WITH_TOOLS = ("chatml", "llama3")
HAVE_PLACE = f"the templates {' and '.join(WITH_TOOLS)} have one"


class ChatTemplate:
    """A compiled template.

    source      its Jinja2
    origin      its name in errors, such as "chatml" or a path
    names       the inputs that `with_names` gave it. The class is made with those of a tokenizer:
                bos_token, eos_token, … → text
    today       the date that strftime_now gives; None: the day of the call
    tool_use    the template for chats with tools; None: the same

    Raises TemplateError for a template that is not Jinja2.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        names: Mapping[str, Any] | None = None,
        today: date | None = None,
        tool_use: ChatTemplate | None = None,
    ) -> None:
        self.source, self.origin, self.tool_use = source, origin, tool_use
        self._names, self._today = dict(names or {}), today
        self._fixed = frozenset(self._names)
        self.names: Mapping[str, Any] = {}  # the further inputs that were given
        if len(source) > MOST_SOURCE:
            raise TemplateError(
                f"{origin}: the chat template has {len(source)} characters, wanted at most "
                f"{MOST_SOURCE}"
            )
        from pyggml.chat.sandbox import Sandbox  # imports Jinja2, which runs without chats need not

        self._sandbox = Sandbox(self._strftime_now)
        limits.SPENT.begin()
        try:
            self._compiled = self._sandbox.from_string(source)
        except Exception as error:  # Jinja2 raises whatever Python does
            raise TemplateError(f"{origin}: {_reason(error)}") from None

    def for_tools(self, tools: Tools) -> ChatTemplate:
        """The template that writes a chat with these tools, as transformers chooses it."""
        return self.tool_use if tools and self.tool_use is not None else self

    def with_names(self, names: Mapping[str, Any]) -> ChatTemplate:
        """The template with further inputs, such as enable_thinking.

        Raises TemplateError for one that it does not read, or that is no input of a user's.
        """
        if not names:
            return self
        templates = [self, self.tool_use] if self.tool_use else [self]
        for name in names:
            if name in _OWN or name in self._fixed:
                raise TemplateError(f"{name}, an input of {self.origin}, cannot be set")
            if not any(name in template.inputs for template in templates):
                raise TemplateError(f"{self.origin} does not read {name}")
        changed = copy(self)
        changed.names = {**self.names, **{name: _plain(value) for name, value in names.items()}}
        changed._names = {**self._names, **changed.names}
        if self.tool_use is not None:
            read = {name: value for name, value in names.items() if name in self.tool_use.inputs}
            changed.tool_use = self.tool_use.with_names(read)
        return changed

    @cached_property
    def inputs(self) -> frozenset[str]:
        """The names that it reads, those too that it gives a default."""
        from jinja2 import nodes

        tree = self._sandbox.parse(self.source)
        return frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names that the template reads but does not set, such as messages and tools."""
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(self._sandbox.parse(self.source)))

    @cached_property
    def knows_developers(self) -> bool:
        """Whether it asks for the role "developer" anywhere. Where it does not, such a message is
        written as a system's."""
        from jinja2 import nodes

        tree = self._sandbox.parse(self.source)
        return any(text.value == _DEVELOPER for text in tree.find_all(nodes.Const))

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it has {% generation %} blocks."""
        lexed = self._sandbox.lex(self.source)
        return any(kind == "name" and text == "generation" for _, kind, text in lexed)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of the messages. add_generation_prompt: with the start of the assistant's next
        turn.

        Raises TemplateError with the template's own complaint about the messages, or for a template
        that costs too much or does what it may not.
        """
        if (other := self.for_tools(tools)) is not self:
            return other.render(messages, tools, documents, add_generation_prompt)
        has_calls = any(message.get("tool_calls") for message in messages)
        form = self._form if has_calls else AS_GIVEN
        inputs = {
            "messages": [self._with_parts(form.write(self._message(m))) for m in messages],
            "tools": _plain(tools) if tools else None,
            "documents": _plain(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render(inputs)

    def try_render(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False
    ) -> str | None:
        """The same; None for messages that the template refuses."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            return None

    def _render(self, given: Mapping[str, Any]) -> str:
        limits.SPENT.begin()
        try:
            return self._compiled.render({**self._names, **given})
        except Exception as error:  # whatever Python raises for an operation
            raise TemplateError(f"{self.origin}: {_reason(error)}") from None

    def _message(self, message: Message) -> dict[str, Any]:
        """The message as the template reads it: names whose value is None are left out."""
        fields = {name: _plain(value) for name, value in message.items() if value is not None}
        if fields.get("role") == _DEVELOPER and not self.knows_developers:
            fields["role"] = _SYSTEM
        thought = next((fields[name] for name in REASONING if name in fields), None)
        if thought is not None:
            fields = {"thinking": thought, **fields, "reasoning_content": thought}
        return fields

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content as a list of parts, if the template reads no other."""
        content = message.get("content")
        if not isinstance(content, str) or not self._reads_parts:
            return message
        return {**message, "content": [{"type": "text", "text": content}]}

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template writes lists of parts alone, as those for pictures do."""
        if "content" not in self.source or "text" not in self.source:
            return False
        return not self._writes("zqasked") and self._writes([{"type": "text", "text": "zqasked"}])

    def _writes(self, content: Any) -> bool:
        message = {"role": "user", "content": content}
        inputs = dict.fromkeys(_OWN) | {"messages": [message], "add_generation_prompt": True}
        try:
            return "zqasked" in self._render(inputs)
        except TemplateError:
            return False

    @cached_property
    def _form(self) -> Form:
        """The form of calls that the template was written for, found by trying."""
        return next((form for form in FORMS if form.fits(self._render)), AS_GIVEN)

    def render_marked(
        self, messages: Sequence[Message], tools: Tools = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges inside {% generation %} blocks."""
        MARKING.on = True
        try:
            marked = self.render(messages, tools)
        finally:
            MARKING.on = False
        text, ranges = "", list[tuple[int, int]]()
        for i, piece in enumerate(marked.split(OPEN)):
            inside, _, after = piece.partition(CLOSE) if i else ("", "", piece)
            if inside:
                ranges.append((len(text), len(text) + len(inside)))
            text += inside + after
        return text, ranges

    def _strftime_now(self, format: str) -> str:
        limits.check_date(format)
        return (self._today or datetime.now()).strftime(format)


def read_names(text: str) -> dict[str, Any]:
    """Further inputs of a template, a JSON object. TemplateError for anything else."""
    try:
        names = json.loads(text or "{}")
    except ValueError as error:
        raise TemplateError(f"inputs of a chat template are no JSON: {error}") from None
    if not isinstance(names, dict):
        raise TemplateError("inputs of a chat template are no JSON object")
    return names


def _plain(value: Any, depth: int = 0) -> Any:
    """A value made of JSON's types alone: any other type has methods that no sandbox knows."""
    if isinstance(value, str) and (OPEN in value or CLOSE in value):
        raise TemplateError("a message has U+FDD0 or U+FDD1, which are no characters")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _DEEPEST:
        raise TemplateError(f"a message has lists and objects {_DEEPEST} deep, wanted fewer")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise TemplateError(f"a message has a {type(value).__name__}, wanted what JSON can hold")


def _reason(error: Exception) -> str:
    from jinja2.exceptions import TemplateSyntaxError

    from pyggml.chat.sandbox import Refusal

    reason = " ".join(str(error).split())[:300] or type(error).__name__
    match error:
        case Refusal():
            return f"the chat template says: {reason}"
        case OverflowError():
            return f"the chat template was stopped: {reason}"
        case TemplateSyntaxError():
            return f"line {error.lineno} of the chat template: {error.message}"
        case RecursionError():
            return "the chat template was stopped: it calls itself too often"
    return f"the chat template fails: {reason}"
