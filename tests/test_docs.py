"""What the documents tell a newcomer to paste works."""

import re
import sys
from collections import Counter
from itertools import pairwise

import pytest
from guides import DOCS, PYTHON, blocks_of


def test_the_pass_in_the_pipeline_joins_what_it_says():
    """Its last line compares; the table does the same."""
    block, table = blocks_of("pipeline.md")
    names: dict = {}
    exec(block, names)
    exec(table, names)
    with pytest.raises(AssertionError):
        exec(block.replace('OPS["mul_mat"]', 'OPS["silu"]'), {})
    with pytest.raises(AssertionError):
        exec(table.replace("z = add(b, y)", "z = mul(b, y)"), names)


def test_what_the_page_on_values_shows_is_what_python_prints(capsys):
    """Lines of output stand behind the code as comments, or in a block of their own."""
    text = (DOCS / "values.md").read_text("utf-8")
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
    lessons = DOCS / "lessons"
    cells = [c for page in lessons.glob("*.md") for c in PYTHON.findall(page.read_text("utf-8"))]
    imported = {name for c in cells for name in re.findall(r"^(?:import|from) (\w+)", c, re.M)}
    others = imported - {"pyggml", "numba", *sys.stdlib_module_names}
    needed = (lessons / "index.md").read_text("utf-8").split("A lesson needs")[1].split("extra")[0]
    assert {"numpy", "matplotlib"} <= others
    assert {name.lower() for name in others} <= set(re.findall(r"\w+", needed.lower()))


def test_the_index_numbers_all_lessons_and_each_leads_to_the_next():
    lessons = DOCS / "lessons"
    index = (lessons / "index.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| \[[^]]+\]\((\S+\.md)\) \|", index, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    names = [name for _, name in rows]
    assert sorted(names) == sorted(p.name for p in lessons.glob("[!i]*.md"))
    in_nav = re.findall(r"lessons/(\S+\.md)", (DOCS.parent / "mkdocs.yml").read_text("utf-8"))
    assert in_nav == ["index.md", *names]
    for name, after in pairwise(names):
        last = (lessons / name).read_text("utf-8").rstrip().rsplit("\n\n", 1)[-1]
        assert last.startswith("**Next**") and f"]({after})" in last, name


def test_the_reference_lists_nothing_twice():
    listed = Counter(
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)
    )
    assert listed and [name for name, n in listed.items() if n > 1] == []
