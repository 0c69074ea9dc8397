"""Which chat template: the model's own, another of its file, a built-in one, or a file's.

built-in   for
chatml     Qwen, Hermes, SmolLM, LFM2 and whatever has <|im_start|> and <|im_end|>; tools, thoughts
llama3     Llama 3 to 3.3; tools, thoughts
gemma      Gemma 1 to 3
mistral    Mistral 7B v0.3
phi3       Phi 3
alpaca     base models: words for turns, no special token but the end of text

A GGUF file carries templates: a model its own, an adapter the one that it was trained with. It has

tokenizer.chat_template, tokenizer.chat_template.NAME    Jinja2
pyggml.chat.inputs     a key of our own: further inputs of the template, a JSON object
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pyggml import gguf
from pyggml.chat.calls import probe_tool
from pyggml.chat.template import MOST_SOURCE, ChatTemplate, Message, read_names
from pyggml.errors import TemplateError, cause_of, suggestion
from pyggml.files import open_regular
from pyggml.tokenizer import Tokenizer
from pyggml.tokenizer.metadata import INPUTS, TEMPLATE, TOOL_USE, Metadata, template_in

BUILT_IN = ("chatml", "llama3", "gemma", "mistral", "phi3", "alpaca")
MODEL = "model"
_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class _Choice:
    """The text of a template, its name in errors, that for tools, and what inputs come with it."""

    source: str
    origin: str
    tool_use: str | None = None
    inputs: str = ""


def find_template(
    tokenizer: Tokenizer, template_name: str = MODEL, today: date | None = None, names: str = ""
) -> ChatTemplate:
    """The template that `template_name` names, with further inputs, a JSON object.

    "model"        the one of the model's file; for chats with tools its tool_use, if it has that
    a built-in     one of BUILT_IN
    NAME           the file's tokenizer.chat_template.NAME
    a path         the content of that file; of a GGUF file, an adapter or a model, the template
                   that it carries, with the inputs that it carries, over which `names` go

    Raises TemplateError if there is none, for a template that is not Jinja2, and for names that it
    does not read.
    """
    choice, texts = _choose(tokenizer, template_name), tokenizer.special_texts()
    tool_use = None
    if choice.tool_use is not None:
        origin = f"{choice.origin} {TOOL_USE}"
        tool_use = ChatTemplate(choice.tool_use, origin, texts, today)
    template = ChatTemplate(choice.source, choice.origin, texts, today, tool_use)
    return template.with_names({**read_names(choice.inputs), **read_names(names)})


def carries_template(path: Path) -> bool:
    """Whether a GGUF file, such as an adapter, carries a chat template."""
    with gguf.open(path) as file:
        return TEMPLATE in file.metadata


def template_metadata(template: ChatTemplate) -> dict[str, str | None]:
    """The keys that carry a template in a file; None: the file is to lack that key."""
    tool_use = template.tool_use
    inputs = json.dumps(template.names, ensure_ascii=False) if template.names else None
    return {
        TEMPLATE: template.source,
        f"{TEMPLATE}.{TOOL_USE}": tool_use.source if tool_use else None,
        INPUTS: inputs,
    }


def carried_metadata(path: Path) -> dict[str, str | None]:
    """The keys by which this file carries a template, as `template_metadata` makes them, or {}."""
    with gguf.open(path) as file:
        return template_in(file)


def template_file(name: str) -> Path | None:
    """The file of Jinja2 that holds a built-in template or is named itself; None if none is."""
    path = _built_in(name) if name in BUILT_IN else Path(name)
    try:
        with open_regular(path) as file:
            return None if file.read(len(_MAGIC)) == _MAGIC else path
    except (OSError, ValueError):
        return None


def _built_in(name: str) -> Path:
    return Path(__file__).with_name("builtin") / f"{name}.jinja"


def write_alike(a: ChatTemplate, b: ChatTemplate) -> bool:
    """Whether two templates write short chats alike, those with tools too."""
    return all(a.try_render(*chat, True) == b.try_render(*chat, True) for chat in _PROBES)


_PROBE: list[Message] = [
    {"role": role, "content": f" the {role}'s "} for role in ("system", "user", "assistant", "user")
]
_CALL = {
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "it"}},
    "id": "a12345678",
}
_CALLING: list[Message] = [
    _PROBE[1],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "look", "content": "seen", "tool_call_id": "a12345678"},
]
_TOOL = probe_tool("look", "Look.", {"at": {"type": "string"}})
_PROBES: tuple[tuple[list[Message], list[Any]], ...] = (
    (_PROBE, []),
    (_PROBE[1:], []),
    (_PROBE[1:], [_TOOL]),
    (_CALLING, [_TOOL]),
)


def _choose(tokenizer: Tokenizer, name: str) -> _Choice:
    if name == MODEL:
        return _file_template(
            tokenizer.chat_templates, tokenizer.chat_inputs, "the model's chat template"
        )
    if name in BUILT_IN:
        text = _built_in(name).read_text(encoding="utf-8")
        return _Choice(text, f"the chat template {name}")
    if name in tokenizer.chat_templates:
        return _Choice(tokenizer.chat_templates[name], f"the model's chat template {name}")
    path = Path(name)
    try:
        with open_regular(path) as file:
            raw = file.read(4 * MOST_SOURCE + 1)
        if raw[: len(_MAGIC)] != _MAGIC:
            return _Choice(raw.decode(), name)
    except UnicodeDecodeError:
        raise TemplateError(f"{path}: is not UTF-8, wanted a chat template") from None
    except (OSError, ValueError) as error:
        names = (MODEL, *filter(None, tokenizer.chat_templates), *BUILT_IN)
        raise TemplateError(
            f"{name}: is no chat template, wanted one of {', '.join(names)}, or a file "
            f"({cause_of(error)}){suggestion(name, names)}"
        ) from None
    with gguf.open(path) as opened:
        metadata = Metadata({key: opened.get(key) for key in opened.metadata})
    origin = f"the chat template of {path.name}"
    return _file_template(metadata.variants(TEMPLATE), metadata.text(INPUTS) or "", origin)


def _file_template(templates: Mapping[str, str], inputs: str, origin: str) -> _Choice:
    """The template of a file with these; TemplateError if it has none."""
    name = next((name for name in ("", "default") if name in templates), None)
    if name is not None:
        return _Choice(templates[name], origin, templates.get(TOOL_USE), inputs)
    named = "".join(f"{name}, " for name in templates)
    owner = "the model's file" if origin.startswith("the model") else origin.split(" of ", 1)[1]
    raise TemplateError(
        f"{owner} has no chat template: name one, {named}{', '.join(BUILT_IN)} or a file of Jinja2"
    )
