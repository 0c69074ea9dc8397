"""What MkDocs does to the pages beyond its plugins: lessons get the outputs of their cells, names
of the package become links to the reference."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import notebooks

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"(^```.*?^```$|^    .*?$|<pre.*?</pre>|<div.*?</div>)", re.M | re.S)
_NAME = re.compile(r"`(pyggml(?:\.\w+)+)`")


def on_startup(**_: Any) -> None:
    """The reference looks for its folder when MkDocs starts, which is before a build."""
    on_pre_build()


def on_pre_build(**_: Any) -> None:
    """The sources as they are installed, for the reference: lora/ lies inside pyggml/."""
    shutil.rmtree(ROOT / ".cache/installed", ignore_errors=True)
    for source, target in (("pyggml", "pyggml"), ("lora", "pyggml/lora")):
        for path in (ROOT / source).rglob("*.py"):
            copy = ROOT / ".cache/installed" / target / path.relative_to(ROOT / source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def on_files(files: Files, config: Any) -> Files:
    """Every lesson is there as a notebook as well."""
    for lesson in notebooks.LESSONS:
        book = nbformat.writes(notebooks.notebook(lesson.read_text("utf-8")))
        files.append(File.generated(config, f"lessons/{lesson.stem}.ipynb", content=book))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    lesson = ROOT / "docs" / page.file.src_uri
    if lesson in notebooks.LESSONS:
        title, rest = markdown.split("\n", 1)
        link = f"[This lesson as a notebook]({lesson.stem}.ipynb){{ .notebook }}"
        markdown = notebooks.page(f"{title}\n\n{link}\n{rest}", notebooks.execute(lesson))
    parts = _FENCE.split(markdown)
    parts[::2] = [_NAME.sub(_link, p) for p in parts[::2]]
    return "".join(parts)


def _link(m: re.Match[str]) -> str:
    return f'<autoref identifier="{m[1]}" optional><code>{m[1]}</code></autoref>'
