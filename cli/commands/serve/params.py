"""A request's JSON object → its parameters, or an ApiError with everything that is wrong with it.

Fields of sampling are those of pyggml.generation.Sampling, by their names; the API's own names for
some of them (`logprobs`, `top_logprobs`, `stop` as one string) are read here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pyggml.chat import Message
from pyggml.chat.messages import BadValue, checked_value, messages_of
from pyggml.chat.tools import ToolChoice
from pyggml.cli.commands.serve.choices import read_choice
from pyggml.cli.commands.serve.fields import Fields, anything, brief, flag, object_of, text, whole
from pyggml.cli.commands.serve.limits import MOST_BIASES, MOST_TOP_LOGPROBS, Limits
from pyggml.cli.commands.serve.reference import CHATS
from pyggml.generation import Sampling
from pyggml.generation.sampling import FORMS

Prompt = str | list[int]
MOST = 1 << 31
_MOST_SCALE = 1000  # of a control vector
# The API reads these in another form than Sampling has them.
_OWN_FORM = {"logprobs", "stop", "logit_bias", *FORMS}
_PLAIN = [f.name for f in fields(Sampling) if f.name not in _OWN_FORM]


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """What both kinds of request have.

    model           None: the first one
    how             sampling, of which the server's settings are the default
    n               answers to each prompt
    n_tokens        the most of an answer; None: as many as fit
    include_usage   whether a stream ends with the counts of tokens
    tells_prompt    whether the log-probabilities of the prompt's tokens are wanted
    controls        control vectors and their scales; None: the server's
    predicted       tokens that an answer may have
    """

    model: str | None
    how: Sampling
    n: int
    n_tokens: int | None
    stream: bool
    include_usage: bool
    tells_prompt: bool = False
    controls: Mapping[str, float] | None = None
    predicted: Sequence[int] = ()

    def alone(self) -> "Params":
        """These without what a request is made of: messages, tools and texts may take dozens of
        times the memory of their tokens, and a request may wait long."""
        return Params(**{f.name: getattr(self, f.name) for f in fields(Params)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParams(Params):
    """messages and tools are as a chat template reads them.

    choice      of the tools; None: none may be called
    names       further inputs of it
    continues   whether the answer goes on with the last message, which the assistant began
    prediction  what the answer may say
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    choice: ToolChoice | None
    names: Mapping[str, Any]
    continues: bool = False
    prediction: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextParams(Params):
    """prompts are texts or token ids. echo: the answer begins with its prompt."""

    prompts: list[Prompt]
    echo: bool


def read_chat(given: Mapping[str, Any], defaults: Sampling, limits: Limits) -> ChatParams:
    f = Fields(given)
    messages, _ = f.need("messages", _messages, ((), {}))
    choice = read_choice(f)
    names = {**f.take("chat_template_kwargs", lambda v: checked_value(object_of(v)), {})}
    for name in ("enable_thinking", "reasoning_effort"):
        if name in f:
            names[name] = f.take(name, anything, None)
    continues = f.take("continue_final_message", flag, False)
    f.only("add_generation_prompt", (not continues,), _asks(continues))
    prediction = f.take("prediction", _prediction, "")
    CHATS.read_rest(f)
    tell = f.take("logprobs", flag, False)
    n_likeliest = f.take("top_logprobs", whole(0, MOST_TOP_LOGPROBS), 0)
    if n_likeliest and not tell:
        f.fault("top_logprobs", "is there, wanted logprobs true beside it")
    n_tokens = f.take("max_completion_tokens", whole(1, MOST), None)
    common = _common(f, defaults, limits, n_likeliest if tell else None, n_tokens)
    f.check()
    chat: dict[str, Any] = {
        "messages": messages,
        "tools": tuple(choice.tools) if choice else (),
        "choice": choice,
        "names": names,
        "continues": continues,
        "prediction": prediction,
    }
    return ChatParams(**chat, **common)


def _asks(continues: bool) -> str:
    if continues:
        return "wanted false beside continue_final_message"
    return "wanted true: an answer is asked for, or continue_final_message beside it"


def read_text(given: Mapping[str, Any], defaults: Sampling, limits: Limits) -> TextParams:
    f = Fields(given)
    prompts: list[Prompt] = f.need("prompt", read_prompts, [])
    echo = f.take("echo", flag, False)
    f.only("store", (False,), "wanted false: nothing is kept")
    f.ignore(*CHATS.ignored)
    f.only("suffix", ("",), "wanted none: text is not filled in")
    f.only("best_of", (given.get("n") or 1,), "wanted as n: no answers are dropped")
    n_logprobs = f.take("logprobs", whole(0, MOST_TOP_LOGPROBS), None)
    common = _common(f, defaults, limits, n_logprobs, None, fewest=0)
    if common["n_tokens"] == 0 and not (echo and n_logprobs is not None):
        f.fault("max_tokens", "is 0, wanted 1 or more, or echo and logprobs beside it")
    n = len(prompts) * common["n"]
    if n > limits.choices:
        f.fault("prompt", f"and n ask for {n} answers, wanted at most {limits.choices}")
    f.check()
    common["tells_prompt"] = echo and n_logprobs is not None
    return TextParams(prompts=prompts, echo=echo, **common)


def _common(
    f: Fields, defaults: Sampling, limits: Limits, n_logprobs: int | None, n_tokens: int | None,
    fewest: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """fewest: tokens of an answer."""
    given = {name: f.take(name, anything, None) for name in _PLAIN if name in f}
    given |= {"stop": f.take("stop", _stops, defaults.stop), "logprobs": n_logprobs}
    given["logit_bias"] = f.take("logit_bias", _biases, defaults.logit_bias)
    given |= _forms(f)
    how = f.build(lambda **changes: replace(defaults, **changes), given)
    stream = f.take("stream", flag, False)
    options: Mapping[str, bool] = f.take("stream_options", _stream_options, {})
    return {
        "model": f.take("model", text, None),
        "controls": f.take("control_vectors", _scales, None),
        "how": how,
        "n": f.take("n", whole(1, limits.choices), 1),
        "n_tokens": f.take("max_tokens", whole(fewest, MOST), n_tokens),
        "stream": stream,
        "include_usage": bool(options.get("include_usage")),
    }


# -- readers ------------------------------------------------------------------------------------


def _messages(value: Any) -> tuple[tuple[Message, ...], Mapping[int, float]]:
    if not isinstance(value, list):
        raise BadValue(f"is {brief(value)}, wanted a list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message:
            raise BadValue(f"has a message {i + 1} without a role")
    return messages_of(value)


def _prediction(value: Any) -> str:
    """The text of a prediction: that of content, or of the parts of it."""
    content = object_of(value).get("content")
    if value.get("type") != "content" or not isinstance(content, str | list):
        raise BadValue("is no prediction, wanted type content, and a content of text")
    parts = [content] if isinstance(content, str) else [object_of(p).get("text") for p in content]
    return "".join(map(text, parts))


def read_prompts(value: Any) -> list[Prompt]:
    """A text, ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadValue(f"is {brief(value)}, wanted a string, token ids, or a list of either")
    return [_prompt(item, i) for i, item in enumerate(value)]


def _prompt(value: Any, i: int) -> Prompt:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list) and all(_is_id(item) for item in value):
        return value
    raise BadValue(f"{i + 1} is {brief(value)}, wanted a string or token ids")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise BadValue(f"is {brief(value)}, wanted a string or a list of strings")
    return tuple(text(item) for item in stops)


def _biases(value: Any) -> dict[str, Any]:
    biases = object_of(value)
    if len(biases) > MOST_BIASES:
        forbids = all(bias == -math.inf for bias in biases.values())
        said = f"{'forbids' if forbids else 'names'} {len(biases)} tokens"
        raise BadValue(f"{said}, wanted at most {MOST_BIASES}: it is kept as long as the request")
    return biases


def _scales(value: Any) -> dict[str, float]:
    scales = object_of(value)
    for name, scale in scales.items():
        if type(scale) not in (int, float) or not abs(scale) <= _MOST_SCALE:
            range_of_scales = f"a number from -{_MOST_SCALE} to {_MOST_SCALE}"
            raise BadValue(f"has {name[:40]!r} {brief(scale)}, wanted {range_of_scales}")
    return dict(scales)


def _stream_options(value: Any) -> Mapping[str, bool]:
    for name, option in object_of(value).items():
        if name not in ("include_usage", "include_obfuscation") or not isinstance(option, bool):
            raise BadValue(f"has {name[:40]!r} {brief(option)}, wanted include_usage true or false")
    return dict(value)


def _forms(f: Fields) -> dict[str, str | None]:
    """What holds the answer to a form, in the settings' words; nothing where the request has none:
    then the server's stands."""
    forms = {
        "json_schema": f.take("json_schema", _schema, None),
        "regex": f.take("regex", text, None),
        "grammar": f.take("grammar", text, None),
    }
    schema = f.take("response_format", _format, None)
    if schema and any(form is not None for form in forms.values()):
        f.fault("response_format", "is given beside another form, wanted one")
    if schema:
        forms["json_schema"] = schema
    is_given = "response_format" in f or any(form is not None for form in forms.values())
    return forms if is_given else {}


def _format(value: Any) -> str:
    """A JSON schema; "" of plain text."""
    kind = object_of(value).get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return _schema(value.get("schema") or {"type": "object"})
    if kind == "json_schema":
        return _schema(object_of(object_of(value.get("json_schema")).get("schema")))
    raise BadValue(f"has type {brief(kind)}, wanted text, json_object or json_schema")


def _schema(value: Any) -> str:
    """The text of a schema, which clients send as an object."""
    return json.dumps(checked_value(object_of(value)))
