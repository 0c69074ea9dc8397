"""A run's bar in the cell of a notebook, as a picture that is replaced: it needs no widgets, and
stays in the file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from io import StringIO
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from pyggml.lora import Report

_APART = 0.25  # seconds between two pictures
_PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


def notebook() -> bool:
    """Whether a cell of a notebook is what shows the output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def show_in_cell(
    progress: Progress, show: Callable[[Report], None]
) -> Iterator[Callable[[Report], None]]:
    """For a context: `show`, after which the cell shows what has become of the progress."""
    display: Any = sys.modules["IPython"].display.display
    handle, last = display(_Picture(progress), display_id=True), perf_counter()

    def report(event: Report) -> None:
        nonlocal last
        show(event)
        if perf_counter() - last >= _APART:
            last = perf_counter()
            handle.update(_Picture(progress))

    try:
        yield report
    finally:
        handle.update(_Picture(progress))


class _Picture:
    """What a progress shows now."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def _repr_mimebundle_(self, include: Any, exclude: Any, **how: Any) -> dict[str, str]:
        from rich.console import Console  # where a run is shown by lines, nobody needs it

        # Of the width that the words were fitted to, whatever the cell has.
        width = self._progress.console.width
        page = Console(record=True, file=StringIO(), width=width, force_jupyter=False)
        page.print(self._progress.make_tasks_table(self._progress.tasks))
        text = page.export_text(clear=False)
        return {
            "text/html": page.export_html(inline_styles=True, code_format=_PRE),
            "text/plain": text,
        }
