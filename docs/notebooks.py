"""Lessons are Markdown whose Python blocks run as the cells of one notebook.

python docs/notebooks.py docs/lessons/backward.md     writes backward.ipynb, to work in

`execute` runs a lesson in a process of its own, and `page` is the lesson with what its cells gave.
Blocks inside <details>, the answers to exercises, run as well; in the notebook they stay text, as
they would give themselves away.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "docs/lessons").glob("[!i]*.md"))
CACHE = ROOT / ".cache/lessons"
LIMIT = 600  # seconds for one cell, on a machine that is busy compiling

_CELL = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_ANSWER = re.compile(r"^<details.*?^</details>$", re.M | re.S)
# Figures as SVG that takes the colours of the page around it: see _svg.
_SETUP = """
%config InlineBackend.figure_formats = ["svg"]
%config InlineBackend.rc = {"figure.figsize": (7, 3.2), "figure.facecolor": "none", \
"axes.facecolor": "none", "savefig.facecolor": "none", "legend.framealpha": 0, \
"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
"""


class CellFailed(Exception):
    """A cell that raised, with its text, what it printed, and the traceback."""


def cells(text: str) -> list[str]:
    """The Python blocks of a lesson."""
    return _CELL.findall(text)


def notebook(text: str) -> NotebookNode:
    """The lesson to work in: nothing is executed, and answers are folded away."""
    answers = [m.span() for m in _ANSWER.finditer(text)]
    parts, end = list[NotebookNode](), 0
    for m in _CELL.finditer(text):
        if any(a < m.start() < b for a, b in answers):
            continue
        parts += [new_markdown_cell(text[end : m.start()].strip()), new_code_cell(m[1].strip())]
        end = m.end()
    parts.append(new_markdown_cell(text[end:].strip()))
    return new_notebook(cells=[c for c in parts if c.source], metadata=_PYTHON)


_PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def execute(lesson: Path, again: bool = False, checked: bool = False) -> list[list[dict[str, Any]]]:
    """The outputs of each cell, from the cache if neither the lesson nor the package has changed.

    again: run it in any case. checked: with kernels that check bounds, where this process has them,
    and not with those of users. Raises CellFailed for a cell that fails.
    """
    text = lesson.read_text("utf-8")
    kept = CACHE / f"{lesson.stem}-{_state(text)}.json"
    if not again and kept.is_file():
        stored: list[list[dict[str, Any]]] = json.loads(kept.read_text("utf-8"))
        return stored
    try:
        outputs = [cell.outputs for cell in _run(text, checked).cells[1:]]
    except (CellExecutionError, CellTimeoutError) as error:
        raise CellFailed(f"{lesson.name}: {_COLOUR.sub('', str(error))}") from None
    if checked:  # a sum may differ in its last bit from the one that users see
        return outputs
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob(f"{lesson.stem}-*.json"):
        old.unlink()
    kept.write_text(json.dumps(outputs), "utf-8")
    return outputs


def _run(text: str, checked: bool) -> NotebookNode:
    book = new_notebook(metadata=_PYTHON)
    book.cells = [new_code_cell(source) for source in (_SETUP, *cells(text))]
    env = {k: v for k, v in os.environ.items() if checked or k != "NUMBA_BOUNDSCHECK"}
    with TemporaryDirectory() as folder:  # what a lesson writes goes with it
        place = {"metadata": {"path": folder}}
        client = NotebookClient(
            book, timeout=LIMIT, resources=place, extra_arguments=["--log-level=ERROR"]
        )
        client.execute(env=env | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    return book


def _state(text: str) -> str:
    """A word for what a lesson's outputs depend on: its text, this file, and the package."""
    digest = hashlib.sha256(text.encode() + Path(__file__).read_bytes())
    for folder in ("pyggml", "lora", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# -- the page --------------------------------------------------------------------------------------


def page(text: str, outputs: list[list[dict[str, Any]]]) -> str:
    """The lesson's Markdown with the outputs below their cells."""
    rest = iter(outputs)
    text = _CELL.sub(lambda m: "\n\n".join([m[0], *_show(next(rest))]), text)
    return re.sub(r"^<details>", '<details markdown="1">', text, flags=re.M)


def _show(outputs: list[dict[str, Any]]) -> Iterator[str]:
    for out in outputs:
        if out["output_type"] == "stream":
            yield _text(out["text"])
            continue
        data = out["data"]
        if "image/svg+xml" in data:
            yield _picture(_svg(data["image/svg+xml"]))
        elif "text/html" in data:
            yield _picture(data["text/html"])
        else:
            yield _text(data["text/plain"])


def _picture(html: str) -> str:
    """A picture that is dark where the page is, not where the system is."""
    html = html.replace("@media (prefers-color-scheme: dark)", '[data-md-color-scheme="slate"]')
    return f'<div class="picture">{html}</div>'


def _text(text: str) -> str:
    return f'<pre class="output">{escape(text.rstrip())}</pre>'


def _svg(svg: str) -> str:
    """A picture inside a page: matplotlib's black becomes the page's colour of text, and its rule
    for all elements goes."""
    svg = svg[svg.index("<svg") :]
    if "matplotlib" in svg:
        svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.S)
        svg = svg.replace("#000000", "currentColor")
        svg = svg.replace('<text style="', '<text style="fill: currentColor; ')
    return svg


def main(*files: str) -> None:
    """Write the notebook of each lesson into this folder."""
    for name in files:
        target = Path(name).with_suffix(".ipynb").name
        nbformat.write(notebook(Path(name).read_text("utf-8")), target)
        sys.stdout.write(f"{target}: open it with `jupyter lab {target}`\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
