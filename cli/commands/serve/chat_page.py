"""The chat page of `--web`: files that lie in web/, and fetch nothing but this server's answers.

Markdown is read by marked 18.2.1 (MIT) and made safe by DOMPurify 3.4.18 (Apache 2.0 or MPL 2.0),
both as npm has them (marked/lib/marked.umd.js, dompurify/dist/purify.min.js), with their licences.
The page's policy takes HTML from DOMPurify alone.
"""

from dataclasses import fields
from typing import Any

from starlette.routing import Route

from pyggml.cli.terminal.show import printable
from pyggml.cli.web.files import file_routes, text_endpoint
from pyggml.cli.web.pages import fill
from pyggml.generation import Sampling

_HOME = "pyggml.cli.commands.serve"
_SCRIPTS = ("page.js", "api.js", "store.js", "markdown.js", "marked.umd.js", "purify.min.js")
_FILES = ("page.css", "icon.svg", *_SCRIPTS)
_TRUSTED = "require-trusted-types-for 'script'; trusted-types dompurify"


def page_routes(title: str, chats: bool, defaults: Sampling) -> list[Route]:
    """The page at /, and its parts. title: the model's name; chats: whether it has a template."""
    fields = {"title": printable(title), "chats": chats, "settings": _settings(defaults)}
    text = fill(_HOME, "web/page.html", **fields)
    page = Route("/", text_endpoint(text, "text/html", more=_TRUSTED))
    return [page, *file_routes(_HOME, {f"/{name}": f"web/{name}" for name in _FILES})]


def _settings(defaults: Sampling) -> list[dict[str, Any]]:
    """The settings of sampling that are numbers, for the page's fields."""
    settings = []
    for f in fields(Sampling):
        value = getattr(defaults, f.name)
        if type(value) in (int, float):
            label = f.name.replace("_", " ").capitalize()
            about = {"help": f.metadata["help"], "wanted": f.metadata["range"]}
            step = 1 if isinstance(value, int) else "any"
            shown = "random" if (f.name, value) == ("seed", -1) else value
            settings.append(
                {"name": f.name, "label": label, "step": step, "default": shown} | about
            )
    return settings
