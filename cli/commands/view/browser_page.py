"""The page: files that lie in web/, and the charts of the report."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined
from starlette.routing import Route

from pyggml.cli.web.files import text_endpoint
from pyggml.cli.web.pages import hash_of, part
from pyggml.look.draw import heat, svg, tokens

_HOME, _REPORT = "pyggml.cli.commands.view", "pyggml.cli.web.report"
_SCRIPTS = (
    *("app", "page", "tree", "lines", "model", "tensor", "pass", "graph", "plan", "run"),
    *("gradients", "text"),
)
_PARTS = {
    "/page.css": (_HOME, "web/page.css", "text/css"),
    "/icon.svg": (_HOME, "web/icon.svg", "image/svg+xml"),
    "/uPlot.css": (_REPORT, "uPlot.min.css", "text/css"),
    "/charts.js": (_REPORT, "charts.js", "text/javascript"),
    "/uPlot.js": (_REPORT, "uPlot.iife.min.js", "text/javascript"),
    **{f"/{name}.js": (_HOME, f"web/{name}.js", "text/javascript") for name in _SCRIPTS},
}


def page_routes(title: str) -> list[Route]:
    """The page at /, and its parts."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    text = environment.from_string(part(_HOME, "web/page.html")).render(title=title)
    drawn = " ".join(map(hash_of, (svg.STYLE, heat.STYLE)))  # the pictures bring these
    style = Route("/tokens.css", text_endpoint(tokens.STYLE, "text/css"))
    parts = [
        Route(path, text_endpoint(part(home, name), kind))
        for path, (home, name, kind) in _PARTS.items()
    ]
    return [Route("/", text_endpoint(text, "text/html", drawn)), style, *parts]
