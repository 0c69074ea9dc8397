"""Which chat template: the model's own, another of its file, a built-in one, or a file's.

built-in   for
chatml     Qwen, SmolLM, LFM2 and whatever has <|im_start|> and <|im_end|>
llama3     Llama 3
gemma      Gemma 1 to 3
mistral    Mistral 7B v0.3
phi3       Phi 3
alpaca     base models: words for turns, no special token but the end of text
"""

from datetime import date
from pathlib import Path

from pyggml.chat.template import MOST_SOURCE, ChatTemplate, read_names
from pyggml.errors import TemplateError, suggestion
from pyggml.tokenizer import Tokenizer

BUILT_IN = ("chatml", "llama3", "gemma", "mistral", "phi3", "alpaca")
MODEL = "model"
TOOL_USE = "tool_use"  # the template of a file for chats with tools, where it has one


def find_template(
    tokenizer: Tokenizer, wanted: str = MODEL, today: date | None = None, names: str = ""
) -> ChatTemplate:
    """The template that `wanted` names, with further inputs, a JSON object.

    "model"        the one of the model's file; for chats with tools its tool_use, if it has that
    a built-in     one of BUILT_IN
    NAME           the file's tokenizer.chat_template.NAME
    a path         the content of that file

    Raises TemplateError if there is none, for a template that is not Jinja2, and for names that it
    does not read.
    """

    def template(name: str, tool_use: ChatTemplate | None = None) -> ChatTemplate:
        return ChatTemplate(*_source(tokenizer, name), tokenizer.special_texts(), today, tool_use)

    has_other = wanted == MODEL and TOOL_USE in tokenizer.chat_templates
    made = template(wanted, template(TOOL_USE) if has_other else None)
    return made.with_names(read_names(names))


def _source(tokenizer: Tokenizer, wanted: str) -> tuple[str, str]:
    """The template's text, and its name in errors."""
    own = tokenizer.chat_templates
    if wanted == MODEL:
        for name in ("", "default"):
            if name in own:
                return own[name], "the model's chat template"
        others = "".join(f"{name}, " for name in own)
        raise TemplateError(
            f"the model's file has no chat template: name one, {others}{', '.join(BUILT_IN)} or a "
            "file of Jinja2"
        )
    if wanted in BUILT_IN:
        return Path(__file__).with_name("builtin").joinpath(f"{wanted}.jinja").read_text(
            encoding="utf-8"
        ), f"the chat template {wanted}"
    if wanted in own:
        return own[wanted], f"the model's chat template {wanted}"
    path = Path(wanted)
    try:
        with path.open("rb") as file:
            return file.read(4 * MOST_SOURCE + 1).decode(), str(path)
    except UnicodeDecodeError:
        raise TemplateError(f"{path}: is not UTF-8, wanted a chat template") from None
    except (OSError, ValueError) as error:
        names = (MODEL, *filter(None, own), *BUILT_IN)
        raise TemplateError(
            f"{wanted}: is no chat template, wanted one of {', '.join(names)}, or a file "
            f"({getattr(error, 'strerror', None) or error}){suggestion(wanted, names)}"
        ) from None
