"""tools, tool_choice and parallel_tool_calls of a request → which calls an answer may have."""

from collections.abc import Sequence
from typing import Any

from pyggml.chat.messages import BadValue, tools_of
from pyggml.chat.tools import ToolChoice
from pyggml.cli.commands.serve.fields import Fields, brief, flag, object_of

Tool = dict[str, Any]
_MODES = ("auto", "none", "required")
_ONE = "one"  # the mode of a single function that is named


def read_choice(f: Fields) -> ToolChoice | None:
    """None: no tool may be called, and the model hears of none."""
    tools = f.take("tools", _tools, ())
    several = f.take("parallel_tool_calls", flag, True)
    mode, allowed = f.take("tool_choice", lambda value: _choice(value, tools), ("auto", tools))
    if mode == "none" or not allowed:
        return None
    several = several and mode != _ONE
    return ToolChoice(tools=allowed, needs=mode in ("required", _ONE), several=several)


def _tools(value: Any) -> Sequence[Tool]:
    if not isinstance(value, list):
        raise BadValue(f"is {brief(value)}, wanted a list of tools")
    tools = tools_of(value)
    names = [_name(tool) for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadValue(f"has {brief(twice)} twice")
    return tools


def _choice(value: Any, tools: Sequence[Tool]) -> tuple[str, Sequence[Tool]]:
    """A mode, and the tools that are allowed."""
    if isinstance(value, str):
        if value not in _MODES:
            raise BadValue(f"is {brief(value)}, wanted auto, none, required or a function")
        if value == "required" and not tools:
            raise BadValue("is required, wanted tools beside it")
        return value, tools
    kind = object_of(value).get("type")
    if kind == "function":
        name = _known(value, tools)
        return _ONE, [tool for tool in tools if _name(tool) == name]
    if kind != "allowed_tools":
        raise BadValue(f"has type {brief(kind)}, wanted function or allowed_tools")
    allowed = object_of(value.get("allowed_tools"))
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise BadValue("has allowed_tools that are none, wanted mode auto or required, and tools")
    names = {_known(tool, tools) for tool in listed}
    return mode, [tool for tool in tools if _name(tool) in names]


def _known(value: Any, tools: Sequence[Tool]) -> str:
    """The name of a tool that there is."""
    name = object_of(object_of(value).get("function")).get("name")
    if name not in [_name(tool) for tool in tools]:
        raise BadValue(f"names {brief(name)}, which is none of the tools")
    return str(name)


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])
