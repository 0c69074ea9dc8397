"""What the documents tell a newcomer to paste works."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pyggml.ops.arithmetic import unary

ROOT = Path(__file__).parents[1]
NAMES = ", ".join(name for name in vars(unary) if not name.startswith("__"))
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def test_the_op_in_adding_an_op_passes_the_tests_of_every_op(tmp_path):
    """In a file that sees what unary.py sees, declared before the tests ask for ops."""
    (block,) = PYTHON.findall((ROOT / "docs/adding-an-op.md").read_text("utf-8"))
    names = f"from pyggml.ops.arithmetic.unary import {NAMES}"
    pasted = f"from __future__ import annotations\n{names}\n{block}"
    (tmp_path / "pasted.py").write_text(pasted, "utf-8")
    wanted = ("-k", "cube", "-p", "no:cacheprovider", "-p", "pasted", "tests/test_every_op.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *wanted],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_BOUNDSCHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= 14, "four samples forward and back, layouts, threads, in place, drawn ones"


def test_the_pass_in_the_pipeline_joins_what_it_says():
    """Its last line compares."""
    (block,) = PYTHON.findall((ROOT / "docs/pipeline.md").read_text("utf-8"))
    exec(block, {})
    with pytest.raises(AssertionError):
        exec(block.replace('OPS["mul_mat"]', 'OPS["silu"]'), {})


def test_what_the_page_on_values_shows_is_what_python_prints(capsys):
    """Lines of output stand behind the code as comments, or in a block of their own."""
    text = (ROOT / "docs/values.md").read_text("utf-8")
    names = {}
    for block in PYTHON.findall(text):
        exec(block, names)
    printed = " ".join(capsys.readouterr().out.split())
    shown = re.findall(r"#( (?:tensor|\[1|the gradient is|  input|    d\(|and right).*)", text)
    assert len(shown) == 8
    shown += re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    for words in (" ".join(line.split()) for line in shown):
        assert re.sub(r"\d\.\de-\d\d", "", words) in re.sub(r"\d\.\de-\d\d", "", printed)


def test_the_lessons_say_what_they_need():
    """Every package that a lesson imports, and pyggml does not bring, is named where they begin."""
    lessons = ROOT / "docs/lessons"
    cells = [c for page in lessons.glob("*.md") for c in PYTHON.findall(page.read_text("utf-8"))]
    imported = {name for c in cells for name in re.findall(r"^(?:import|from) (\w+)", c, re.M)}
    others = imported - {"pyggml", "numba", *sys.stdlib_module_names}
    needed = (lessons / "index.md").read_text("utf-8").split("A lesson needs")[1].split("extra")[0]
    assert {"numpy", "matplotlib"} <= others
    assert {name.lower() for name in others} <= set(re.findall(r"\w+", needed.lower()))


def test_the_reference_lists_nothing_twice():
    listed = Counter(
        name
        for page in (ROOT / "docs/api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)
    )
    assert listed and [name for name, n in listed.items() if n > 1] == []
