"""Sections as one page that needs nothing but a browser."""

from collections.abc import Sequence
from pathlib import Path

from pyggml.cli.commands.inspect.sections import ReportSection
from pyggml.cli.terminal.kinds import PAGE_WORDS
from pyggml.cli.web import pages
from pyggml.look.draw import heat, svg, tokens


def write(path: Path, title: str, sections: Sequence[ReportSection]) -> None:
    """Raises PyggmlError if the disk refuses."""
    pages.write(path, render(title, sections))


def render(title: str, sections: Sequence[ReportSection]) -> str:
    return pages.render(
        *("pyggml.cli.commands.inspect", "page.html"),
        styles=("page.css",),
        drawn=[svg.STYLE, heat.STYLE, tokens.STYLE],
        first=PAGE_WORDS,
        title=title,
        sections=sections,
        token_style=tokens.STYLE,
    )
