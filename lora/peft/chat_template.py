"""The chat template of a folder of transformers, which an adapter file carries as metadata.

chat_template.jinja                          the template (transformers 4.43 and later)
additional_chat_templates/tool_use.jinja     that for chats with tools
tokenizer_config.json                        "chat_template": the same of before, or a list of names
                                             and templates
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyggml.chat import ChatTemplate, carried_metadata
from pyggml.errors import AdapterError, cause_of
from pyggml.files import open_regular
from pyggml.tokenizer.metadata import INPUTS, TEMPLATE, TOOL_USE

NAME = "chat_template.jinja"
_MORE, _CONFIG = "additional_chat_templates", "tokenizer_config.json"
_MOST_BYTES = 64 << 20  # of tokenizer_config.json, which may list every token


def read(folder: Path) -> dict[str, str]:
    """The keys that carry the folder's template; none where it has none.

    Raises AdapterError for a file that cannot be read, TemplateError for what is not Jinja2.
    """
    texts = {
        TEMPLATE: _text(folder / NAME),
        f"{TEMPLATE}.{TOOL_USE}": _text(folder / _MORE / f"{TOOL_USE}.jinja"),
    }
    if texts[TEMPLATE] is None:
        texts = _of_config(folder / _CONFIG)
    templates = {key: text for key, text in texts.items() if text is not None}
    for key, text in templates.items():
        ChatTemplate(text, f"{folder}: {key}")
    return templates if TEMPLATE in templates else {}


def write(folder: Path, adapter: Path) -> None:
    """Put the template that an adapter carries into a folder, as transformers reads it. Raises
    AdapterError for one with inputs of its own, for which transformers has no place."""
    carried = carried_metadata(adapter)
    if carried.get(INPUTS):
        raise AdapterError(
            f"{adapter}: its chats were written with {carried[INPUTS]} (--chat-template-kwargs), "
            "for which a folder of transformers has no place"
        )
    for key, path in (
        (TEMPLATE, folder / NAME),
        (f"{TEMPLATE}.{TOOL_USE}", folder / _MORE / f"{TOOL_USE}.jinja"),
    ):
        if text := carried.get(key):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")


def _of_config(path: Path) -> dict[str, str | None]:
    value = _json(path).get("chat_template")
    if isinstance(value, str):
        return {TEMPLATE: value}
    named = [t for t in value if isinstance(t, Mapping)] if isinstance(value, list) else []
    texts = {t.get("name"): t.get("template") for t in named}
    return {
        key: text
        for key, name in ((TEMPLATE, "default"), (f"{TEMPLATE}.{TOOL_USE}", TOOL_USE))
        if isinstance(text := texts.get(name), str)
    }


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: is no JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str | None:
    """The text of a file; None if there is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise AdapterError(f"{path}: is larger than {_MOST_BYTES >> 20} MiB")
        with open_regular(path) as file:
            return file.read(_MOST_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(f"{path}: cannot be read: {cause_of(error)}") from None
