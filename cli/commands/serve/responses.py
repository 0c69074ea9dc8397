"""A request to /v1/responses → that of a chat: the same settings under other names.

Items of `input` become messages: texts, calls of functions and what they gave, thoughts. What a
server would have to keep, such as the answer that a request goes on from, is refused by name.
"""

import json
from collections.abc import Mapping
from typing import Any

from pyggml.chat.messages import BadValue, messages_of
from pyggml.cli.commands.serve.fields import Fields, brief, object_of, text, whole
from pyggml.cli.commands.serve.limits import MOST_TOP_LOGPROBS
from pyggml.cli.commands.serve.params import MOST
from pyggml.cli.commands.serve.reference import RESPONSES

Object = dict[str, Any]
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")  # thoughts come in the open
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CHAT_NAMES = (
    *("messages", "max_tokens", "max_completion_tokens", "response_format", "functions"),
    *("function_call", "n", "logprobs", "reasoning_effort", "verbosity"),
)


def chat_of(given: Mapping[str, Any]) -> Object:
    """The request of a chat that asks for the same. Raises ApiError with what is wrong with the
    fields that have other names there."""
    f, asked = Fields(given), {k: v for k, v in given.items() if k not in RESPONSES.own}
    messages: list[Object] = f.need("input", _messages, [])
    if instructions := f.take("instructions", text, ""):
        messages = [{"role": "system", "content": instructions}, *messages]
    includes: list[str] = f.take("include", _includes, [])
    chat = {
        "messages": messages,
        "max_tokens": f.take("max_output_tokens", whole(1, MOST), None),
        "tools": f.take("tools", _tools, None),
        "tool_choice": f.take("tool_choice", _choice, None),
        "reasoning_effort": f.take("reasoning", _effort, None),
        "response_format": f.take("text", _format, None),
        "logprobs": True if _LOGPROBS in includes else None,
    }
    n_likeliest = f.take("top_logprobs", whole(0, MOST_TOP_LOGPROBS), 0)
    if n_likeliest and not chat["logprobs"]:
        f.fault("top_logprobs", f"is there, wanted include [{_LOGPROBS!r}] beside it")
    for name in _CHAT_NAMES:
        f.only(name, (), "which is a field of /v1/chat/completions")
    RESPONSES.read_rest(f)
    f.ignore(*asked)  # which a chat reads by the same names
    f.check()
    return {**asked, **{name: value for name, value in chat.items() if value is not None}}


def echo_of(given: Mapping[str, Any]) -> str:
    """What a response says of its request: the text of a JSON object."""
    names = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user")
    told = {name: given.get(name) for name in names}
    tools = given.get("tools") or []
    return json.dumps(
        {
            **told,
            "metadata": given.get("metadata") or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": [{"parameters": None, "strict": False, **tool} for tool in tools],
            "top_logprobs": given.get("top_logprobs") or 0,
            "truncation": "disabled",
        }
    )


# -- items ----------------------------------------------------------------------------------------


def _messages(value: Any) -> list[Object]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadValue(f"is {brief(value)}, wanted a string or a list of items")
    messages, thought = list[Object](), ""
    for i, item in enumerate(value):
        try:
            kind = object_of(item).get("type") or "message"
            if kind not in list(_ITEMS):  # a client's kind may have no hash
                raise BadValue(f"has type {brief(kind)}, wanted {', '.join(_ITEMS)}")
            message = _ITEMS[kind](item)
        except BadValue as bad:
            raise BadValue(f"has an item {i + 1} that {bad}") from None
        if kind == "reasoning":
            thought += message["reasoning_content"]
        elif kind == "function_call" and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            is_said = thought and message["role"] == "assistant"
            messages.append(message | ({"reasoning_content": thought} if is_said else {}))
            thought = "" if is_said else thought
    messages_of(messages)  # raises for what is none
    return messages


def _message_of(item: Object) -> Object:
    content = item.get("content")
    return {"role": item.get("role"), "content": _text(content, "content")}


def _call_of(item: Object) -> Object:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(item: Object) -> Object:
    output = _text(item.get("output"), "output")
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}


def _thought(item: Object) -> Object:
    """Its content, or without one its summary."""
    said = item.get("content") or item.get("summary") or ""
    return {"role": "assistant", "reasoning_content": _text(said, "content")}


_ITEMS = {
    "message": _message_of,
    "function_call": _call_of,
    "function_call_output": _result,
    "reasoning": _thought,
}


def _text(value: Any, name: str) -> str:
    """A text, or parts that are all texts as one."""
    if not isinstance(value, list):
        return text(value)
    for part in value:
        kind = object_of(part).get("type")
        if kind not in _TEXTS:
            raise BadValue(f"has a {name} with a part of type {brief(kind)}, wanted text alone")
    return "".join(text(part.get("text")) for part in value)


# -- settings -------------------------------------------------------------------------------------


def _includes(value: Any) -> list[str]:
    if not isinstance(value, list) or any(item not in _INCLUDES for item in value):
        raise BadValue(f"is {json.dumps(value)[:80]}, wanted of {', '.join(_INCLUDES)}")
    return value


def _tools(value: Any) -> list[Object]:
    """Functions, whose names stand beside their type here."""
    if not isinstance(value, list):
        raise BadValue(f"is {brief(value)}, wanted a list of tools")
    return [{"type": "function", "function": _function(tool)} for tool in value]


def _function(tool: Any) -> Object:
    kind = object_of(tool).get("type")
    if kind != "function":
        raise BadValue(f"has one of type {brief(kind)}, wanted functions: this server runs none")
    named = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in named if tool.get(name) is not None}


def _choice(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if object_of(value).get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if value.get("type") != "allowed_tools":
        raise BadValue(f"has type {brief(value.get('type'))}, wanted function or allowed_tools")
    listed = value.get("tools")
    tools = [{"function": tool} for tool in listed] if isinstance(listed, list) else listed
    allowed = {"mode": value.get("mode"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _inner(value: Any, allowed: Mapping[str, tuple[Any, ...]], *answered: str) -> Object:
    """An object whose other names have one of the values that are allowed."""
    for name, inner in object_of(value).items():
        if inner is not None and name not in answered and inner not in allowed.get(name, ()):
            raise BadValue(f"has {name[:40]!r} {brief(inner)}, which is not supported")
    return dict(value)


def _effort(value: Any) -> Any:
    """Thoughts come whole: a summary is not made of them."""
    allowed = {"summary": ("auto",), "generate_summary": ("auto",)}
    return _inner(value, allowed, "effort").get("effort")


def _format(value: Any) -> Object | None:
    form = _inner(value, {"verbosity": ("medium",)}, "format").get("format")
    if form is None or object_of(form).get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
