"""The page: files that lie in web/, and the charts of the report."""

from starlette.routing import Route

from pyggml.cli.web.files import file_routes, text_endpoint
from pyggml.cli.web.pages import fill, hash_of
from pyggml.look.draw import heat, svg, tokens

_HOME, _REPORT = "pyggml.cli.commands.view", "pyggml.cli.web.report"
_SCRIPTS = (
    *("app", "page", "tree", "lines", "model", "tensor", "pass", "graph", "plan", "run"),
    *("gradients", "text", "table", "data", "stepper", "zoom", "backward", "numbers"),
    *("tokens", "attention", "lens", "compare", "tabs"),
)
_FILES = {
    "/page.css": "web/page.css",
    "/icon.svg": "web/icon.svg",
    **{f"/{name}.js": f"web/{name}.js" for name in _SCRIPTS},
}
_REPORT_FILES = {
    "/uPlot.css": "uPlot.min.css",
    "/data_card.css": "data_card.css",
    "/charts.js": "charts.js",
    "/ticks.js": "ticks.js",
    "/uPlot.js": "uPlot.iife.min.js",
}


def page_routes(title: str) -> list[Route]:
    """The page at /, and its parts."""
    drawn = " ".join(map(hash_of, (svg.STYLE, heat.STYLE)))  # the pictures bring these
    page = fill(_HOME, "web/page.html", title=title)
    return [
        Route("/", text_endpoint(page, "text/html", drawn)),
        Route("/tokens.css", text_endpoint(tokens.STYLE, "text/css")),
        *file_routes(_HOME, _FILES),
        *file_routes(_REPORT, _REPORT_FILES),
    ]
