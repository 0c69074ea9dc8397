"""Messages as files and requests have them → messages, or `BadValue`.

OpenAI     {"role", "content", "tool_calls", "tool_call_id", "name"}. In its older form
           "function_call", and the role "function" for results
ShareGPT   {"from": human | gpt | system | tool …, "value"}

"weight", 0 to 1, or "train" or "loss", true or false, say how much a message is learned. Marks of
other names, and pictures, are refused.

A message is what a chat template reads, a dict as the OpenAI API has it:

role           one of ROLES
content        a string; "" beside calls of tools that have none
tool_calls     [{"type": "function", "function": {"name": string, "arguments": object}}]; each may
               have an "id"
tool_call_id   on a message of role "tool": whose result it is
name           who speaks, or which tool answers
instruction, input
               what the content of an Alpaca row is made of, for templates that write them apart

A name that a message lacks is absent, never None; names that are not in this list stay, for the
templates that ask for them (`reasoning_content`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Any

from pyggml.chat.template import Message
from pyggml.files.json_text import DECODER, reason_of

ROLES = ("system", "developer", "user", "assistant", "tool")
Messages = tuple[Message, ...]
Weights = Mapping[int, float]  # number of a message → the weight that its file gives it
MARKS = ("weight", "train", "loss")  # of a message or a row: how much of it is learned
OTHER_MARKS = (
    *("mask", "loss_mask", "train_mask", "train_detail", "train_details", "loss_scale"),
    *("loss_weight", "sample_weight", "trainable", "train_on", "training", "masked"),
)
MEDIA = ("image", "images", "video", "videos", "audio", "audios", "image_url", "pixel_values")
MOST_DEPTH = 64  # lists and objects within each other
KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}
_SPEAKERS = {
    **{name: name for name in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
_ROLES = {**{role: role for role in ROLES}, "function": "tool"}
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_SEPARATE = ("role", "content", "tool_calls", "function_call", "from", "value", *MARKS)
_REFUSED = (*OTHER_MARKS, *MEDIA)


class BadValue(Exception):
    """A value that is no message, a record that makes no row, or a row that cannot be encoded.

    The message is the rest of a sentence that starts with the place: BadValue("is no JSON").
    says_all: the names that a row may have are of no help
    """

    def __init__(self, fault: str, joint: str = " ", says_all: bool = False) -> None:
        super().__init__(fault)
        self.joint, self.says_all = joint, says_all

    def at(self, place: object) -> str:
        """The whole sentence, with its place."""
        return f"{place}{self.joint}{self}"


def parse_json(text: str) -> Any:
    """A JSON value. BadValue if it is none, or gives a name twice."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"is no JSON ({reason_of(error)})") from None


def kind_of(value: object) -> str:
    """What JSON calls this value; what a parquet column may hold besides is named by its type."""
    return KINDS.get(type(value), type(value).__name__)


def checked_text(value: Any, may_be_empty: bool) -> str:
    """A string that a tokenizer can read. BadValue otherwise: `is a number`."""
    if not isinstance(value, str):
        raise BadValue(f"is a {kind_of(value)}")
    if not may_be_empty and not value.strip():
        raise BadValue("is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a pair, which no UTF-8 can hold
        half = f"\\u{ord(value[error.start]):04x}"
        fault = f"has {half}, half of a surrogate pair, at character {error.start}"
        raise BadValue(fault) from None
    if "\0" in value:
        raise BadValue(f"has a NUL at character {value.index(chr(0))}")
    return value


def checked_value(value: Any, depth: int = 0) -> Any:
    """A JSON value that a template may print. BadValue if it nests too deeply or is no number."""
    if depth > MOST_DEPTH:
        raise BadValue(f"is nested more than {MOST_DEPTH} deep")
    if isinstance(value, str):
        checked_text(value, may_be_empty=True)
    elif isinstance(value, float) and not isfinite(value):
        raise BadValue(f"holds {value}, which is no JSON")
    elif isinstance(value, dict):
        for name, inner in value.items():
            checked_text(name, may_be_empty=True)
            checked_value(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            checked_value(inner, depth + 1)
    elif type(value) not in KINDS:
        raise BadValue(f"holds a {kind_of(value)}")
    return value


def list_of(value: Any) -> list[Any]:
    """A list, or the text of one, as a column of a table holds it."""
    items = parse_json(value) if isinstance(value, str) else value
    if not isinstance(items, list):
        raise BadValue(f"is a {kind_of(items)}, wanted a list")
    return items


def is_message(value: Any) -> bool:
    """Whether a value has the names of a message, of either form."""
    return isinstance(value, dict) and ("role" in value or "from" in value)


def messages_of(value: Any) -> tuple[Messages, Weights]:
    """Messages of either form, and the weights of those that have one, by their number."""
    items = list_of(value)
    if not items:
        raise BadValue("is empty")
    messages, weights = list[Message](), dict[int, float]()
    for i, item in enumerate(items):
        try:
            messages.append(_message(item))
            weight = weight_of(item)
        except BadValue as bad:
            raise BadValue(f"has a message {i + 1} that {bad}") from None
        if weight is not None:
            weights[i] = weight
    return tuple(messages), weights


def not_learned(messages: Messages, weights: Weights) -> frozenset[int]:
    """The numbers of the messages that are not the assistant's, or have the weight 0."""
    indices = (i for i, m in enumerate(messages) if m["role"] != "assistant")
    return frozenset(indices) | {i for i, weight in weights.items() if not weight}


# -- how much is learned ------------------------------------------------------------------------


def flag_of(value: Any) -> bool:
    """True or false, as JSON, a word or 0 and 1 say it. BadValue for anything else."""
    flag = _FLAGS.get(str(value).strip().lower())
    if flag is None or not isinstance(value, bool | int | float | str):
        raise BadValue(f"is {_brief(value)}, wanted true or false")
    return flag


def share_of(value: Any) -> float:
    """A number from 0 to 1, or the text of one. BadValue for anything else."""
    try:
        share = float(value) if isinstance(value, bool | int | float | str) else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise BadValue(f"is {_brief(value)}, wanted 0 to 1")
    return share


def weight_of(item: Mapping[str, Any]) -> float | None:
    """What the MARKS of a message or a row say together; None if it has none of them."""
    weight, first = None, ""
    for name in MARKS:
        if (value := item.get(name)) is None:
            continue
        is_share = name == "weight"
        mark = _within(name, partial(share_of if is_share else flag_of, value))
        if weight is None:
            weight, first = float(mark), name
        elif bool(mark) != bool(weight):
            both = (f'a "{n}" that is {_brief(item[n])}' for n in sorted((first, name)))
            raise BadValue(f"has {' and '.join(both)}")
    return weight


def _check_marks(item: Mapping[str, Any]) -> None:
    """BadValue for a mark of another name, whose sense is not known, and for what is no text."""
    for name in filter(item.__contains__, _REFUSED):
        if item[name] not in (None, "", []):
            if name in MEDIA:
                raise BadValue(f'has "{name}", wanted text alone')
            marks = 'wanted "weight", 0 to 1, or "train" or "loss", true or false'
            raise BadValue(f'has a "{name}", a mark that is not obeyed: {marks}')


def _brief(value: Any) -> str:
    return f"{value[:20]!r}" if isinstance(value, str) else str(value)[:20]


def _message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise BadValue(f"is a {kind_of(item)}")
    _check_marks(item)
    share_gpt = "from" in item and "role" not in item
    speaker, said = ("from", "value") if share_gpt else ("role", "content")
    who = item.get(speaker)
    roles = _SPEAKERS if share_gpt else _ROLES
    role = roles.get(who) if isinstance(who, str) else None
    if role is None:
        shown = f"{who[:20]!r}" if isinstance(who, str) else f"a {kind_of(who)}"
        raise BadValue(f'has the "{speaker}" {shown}, wanted one of {", ".join(roles)}')
    again = item.get({"content": "value", "value": "content"}[said])
    if again and again != item.get(said):
        raise BadValue('has a "content" and a "value" that differ')
    rest = {k: checked_value(v) for k, v in item.items() if k not in _SEPARATE and v is not None}
    if who == "function_call":
        calls = _within("value", lambda: _calls(parse_json(_text(item, said))))
        return {"role": role, "content": "", "tool_calls": calls, **rest}
    calls = item.get("tool_calls") or item.get("function_call")
    content = _content(item, said, may_lack=bool(calls))
    message: dict[str, Any] = {"role": role, "content": content, **rest}
    if calls:
        name = "tool_calls" if item.get("tool_calls") else "function_call"
        message["tool_calls"] = _within(name, lambda: _calls(calls))
    return message


def _within(name: str, read: Callable[[], Any]) -> Any:
    """What `read` returns; its complaint says of what name."""
    try:
        return read()
    except BadValue as bad:
        raise BadValue(f'has a "{name}" that {bad}') from None


def _text(item: dict[str, Any], name: str) -> str:
    return checked_text(item.get(name), may_be_empty=True)


def _content(item: dict[str, Any], name: str, may_lack: bool) -> str:
    """A text, or parts that are all texts as one."""
    value = item.get(name)
    if value is None and may_lack:
        return ""
    if not isinstance(value, list):
        return str(_within(name, lambda: checked_text(value, may_be_empty=True)))
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise BadValue(
                f'has a "{name}" with a part of type {str(kind)[:20]!r}, wanted text alone'
            )
        _within(name, partial(checked_text, part.get("text"), may_be_empty=True))
    return "".join(part["text"] for part in value)


def _calls(value: Any) -> list[dict[str, Any]]:
    """Calls of functions with their arguments as an object; the API has these as JSON text."""
    calls = [value] if isinstance(value, dict) else list_of(value)
    return [_call(item) for item in calls]


def _call(item: Any) -> dict[str, Any]:
    call = item.get("function", item) if isinstance(item, dict) else None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str) or not name:
        raise BadValue('holds what is no call: wanted objects with a "name" and "arguments"')
    arguments = call.get("arguments")
    arguments = parse_json(arguments or "{}") if isinstance(arguments, str) else arguments
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise BadValue(f'has "arguments" that are a {kind_of(arguments)}, wanted an object')
    function = {"name": checked_text(name, False), "arguments": checked_value(arguments)}
    id = {"id": checked_text(item["id"], True)} if item.get("id") is not None else {}
    return {**id, "type": "function", "function": function}


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Functions that the assistant may call; None and the text of a list are lists too."""
    tools = []
    for item in () if value is None or value in ("", {}) else list_of(value):
        tool = parse_json(item) if isinstance(item, str) else item
        if not isinstance(tool, dict):
            raise BadValue(f"holds a {kind_of(tool)}, wanted objects")
        tool = tool if "function" in tool else {"type": "function", "function": tool}
        function = tool["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadValue('holds a function without "name"')
        tools.append(checked_value(tool))
    return tuple(tools)
