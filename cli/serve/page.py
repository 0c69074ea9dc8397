"""The chat page of `--web`: files that lie in web/, and fetch nothing but this server's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyggml.cli.show import printable
from pyggml.generation import Sampling

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
}
_KINDS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}


def page_routes(title: str, chats: bool, defaults: Sampling) -> list[Route]:
    """The page at /, and its parts. title: the model's name; chats: whether it has a template."""
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(_part("page.html"))
    text = page.render(title=printable(title), chats=chats, settings=_settings(defaults))
    parts = [Route(f"/{name}", _sent(_part(name), kind)) for name, kind in _KINDS.items()]
    return [Route("/", _sent(text, "text/html")), *parts]


def _sent(text: str, kind: str) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return Response(text, media_type=kind, headers=_HEADERS)

    return answer


def _part(name: str) -> str:
    return files("pyggml.cli.serve").joinpath(f"web/{name}").read_text(encoding="utf-8")


def _settings(defaults: Sampling) -> list[dict[str, Any]]:
    """The settings of sampling that are numbers, for the page's fields."""
    found = []
    for f in fields(Sampling):
        value = getattr(defaults, f.name)
        if type(value) in (int, float):
            label = f.name.replace("_", " ").capitalize()
            about = {"help": f.metadata["help"], "wanted": f.metadata["wanted"]}
            step = 1 if isinstance(value, int) else "any"
            shown = "random" if (f.name, value) == ("seed", -1) else value
            found.append({"name": f.name, "label": label, "step": step, "default": shown} | about)
    return found
