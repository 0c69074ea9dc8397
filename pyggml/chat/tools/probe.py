"""Which of the syntaxes a template has: that in which it writes a call that it is shown."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pyggml.chat.calls import PROBE_ARGUMENTS, PROBE_NAME, probe_call, probe_tool
from pyggml.chat.template import ChatTemplate, Message
from pyggml.chat.tools.reader import calls_in
from pyggml.chat.tools.syntax import BARE, SYNTAXES, CallSyntax


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """How calls are written in a template's chats. several: whether one answer may have more."""

    syntax: CallSyntax
    several: bool


_VALUE = next(iter(PROBE_ARGUMENTS.values()))
_ASKED: Message = {"role": "user", "content": "zqasked"}
_ARGUMENT = {"type": "string", "description": "d"}
_TOOL = probe_tool(PROBE_NAME, "d", dict.fromkeys(PROBE_ARGUMENTS, _ARGUMENT), required=[])


def find_calls(template: ChatTemplate, names: Collection[str] = ()) -> TemplateCalls | None:
    """How this template's models write calls: as it writes one that it is shown; None for a syntax
    that is not declared.

    A template that shows none, but tells the model of a mark, is of that mark's; so is one for a
    vocabulary that has it among `names`, those of its control tokens. For all others a call is an
    object alone.
    """
    template = template.for_tools([_TOOL])
    if one := _written(template, 1):
        syntax = next((syntax for syntax in SYNTAXES if _reads(syntax, one) == 1), None)
        if syntax is None:
            return None
        return TemplateCalls(syntax, several=_reads(syntax, _written(template, 2)) == 2)
    told = template.try_render([_ASKED], [_TOOL], True) or ""
    for syntax in SYNTAXES:
        if any(mark in told or mark in names for mark in syntax.marks):
            return TemplateCalls(syntax, several=True)
    return TemplateCalls(BARE, several=True)


def _written(template: ChatTemplate, n: int) -> str:
    """What a template writes of an answer with n calls, or ""."""
    calls = [probe_call(i) for i in range(n)]
    prompt = template.try_render([_ASKED], [_TOOL])
    message: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    text = template.try_render([_ASKED, message], [_TOOL]) or ""
    after = text.rfind("zqasked") + len("zqasked")
    return text[after:] if prompt and _VALUE in text[after:] else ""


def _reads(syntax: CallSyntax, text: str) -> int:
    """How many calls of the probe, with its arguments, a syntax finds in a text."""
    calls = calls_in(text, syntax, [_TOOL])
    return len(calls) if all(call == (PROBE_NAME, PROBE_ARGUMENTS) for call in calls) else 0
