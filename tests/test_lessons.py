"""The lessons run, each in a process of its own; the site is built of them without a warning."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from extras import need, reason
from processes import python

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "docs/lessons").glob("[!i]*.md"))
# Run every time, with the compiled kernels of other tests. The others take minutes, but for `lora`,
# which trains for half of one: one measures speed, on kernels as users have them.
BRIEF = ("mini-engine", "training-inside")
pytest.importorskip("nbclient", reason=reason("nbclient"))


@pytest.fixture(scope="module")
def notebooks():
    """docs/notebooks.py, as the site imports it."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("notebooks")
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.mark.filterwarnings("ignore")  # of Jupyter's messages, not ours
@pytest.mark.parametrize(
    "lesson",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem not in BRIEF), id=p.stem) for p in LESSONS],
)
def test_every_cell_runs_and_what_a_lesson_claims_holds(notebooks, lesson):
    text = lesson.read_text("utf-8")
    try:
        outputs = notebooks.execute(lesson, again=True, checked=lesson.stem in BRIEF)
    except notebooks.CellFailed as failed:
        pytest.fail(str(failed), pytrace=False)
    assert len(outputs) == len(notebooks.cells(text)) >= 10
    page = notebooks.page(text, outputs)
    assert page.count('class="output"') + page.count('class="picture"') >= 10
    assert 'class="picture"' in page


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_has_exercises_with_folded_answers(notebooks, lesson):
    """An answer's code is a cell of the page, and folded text of the notebook to work in."""
    text = lesson.read_text("utf-8")
    exercises = text[text.index("## Exercises") :]
    n = len(re.findall(r"^\*\*\d\.\*\*", exercises, re.M))
    assert 3 <= n <= 5
    assert exercises.count("<details>") == exercises.count("</details>") == n
    book = notebooks.notebook(text)
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    assert len(code) == len(notebooks.cells(text)) - len(notebooks.cells(exercises))
    assert exercises in "".join(c.source for c in book.cells[-1:]) + "\n"


def test_a_cell_that_fails_is_shown(notebooks, tmp_path):
    lesson = tmp_path / "wrong.md"
    lesson.write_text(
        "# Wrong\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "utf-8"
    )
    with pytest.raises(notebooks.CellFailed, match=r"wrong\.md.*\n-+\nassert x == 2\n(.|\n)*Error"):
        notebooks.execute(lesson, again=True)


@pytest.mark.slow  # it runs every lesson
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    need("mkdocs")
    need("mkdocstrings_handlers")
    done = python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {p.relative_to(tmp_path).as_posix(): p.read_text("utf-8") for p in _pages(tmp_path)}
    assert len(pages) > 30
    fetched = r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?https?://[^">]+'
    for name, text in pages.items():
        assert not re.search(fetched, text), name
    for name in ("pyggml.load", "pyggml.ops.rms_norm", "pyggml.lora.Trainer"):
        assert any(f'id="{name}"' in text for text in pages.values()), name


def _pages(folder):
    return sorted(folder.rglob("*.html"))
