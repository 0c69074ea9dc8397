"""The map is the code: docs/map.md, `pyggml.__doc__`, docs/pipeline.md and the walkthrough name the
same stages in the same order, and each is something that its package exports."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

import pyggml
from pyggml.models import ARCHITECTURES
from pyggml.quants import QUANTS
from pyggml.requantize import FILE_TYPES
from pyggml.tokenizer.kinds import KINDS

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs/map.md").read_text("utf-8")
FORMATS = (ROOT / "docs/formats.md").read_text("utf-8")
# ("pyggml.gguf", "open"), …
STAGES = re.findall(r"^\| `(pyggml\.[\w.]+)` \| `([\w.]+)` \|", MAP, re.M)
NAMES = [f"{module.removeprefix('pyggml.')}.{verb}" for module, verb in STAGES]


def test_the_table_has_the_whole_way():
    assert len(STAGES) == 8
    assert (STAGES[0], STAGES[-1]) == (
        ("pyggml.gguf", "open"),
        ("pyggml.lora.adapter", "Adapter.save"),
    )


@pytest.mark.parametrize(("module", "verb"), STAGES, ids=NAMES)
def test_every_stage_is_there_and_exported(module, verb):
    home = importlib.import_module(module)
    assert callable(reduce(getattr, verb.split("."), home))
    exported = getattr(home, "__all__", None)
    assert exported is None or verb.split(".")[0] in exported


def test_the_package_s_docstring_has_the_table():
    rows = re.findall(r"^(pyggml\.[\w.]+) +([\w.]+)  +\S", pyggml.__doc__, re.M)
    assert rows == STAGES


def test_the_pipeline_has_a_section_for_each():
    text = (ROOT / "docs/pipeline.md").read_text("utf-8")
    assert re.findall(r"^## (\d)\. `([\w.]+)`", text, re.M) == [
        (str(n), name) for n, name in enumerate(NAMES, 1)
    ]


def test_the_tree_has_every_part():
    tree = MAP[MAP.index("## The tree") : MAP.index("docs/    ")]
    told = set(re.findall(r"[\w]+(?:\.py|/)", tree))
    parts = {p for p in (ROOT / "pyggml").iterdir() if p.suffix == ".py" or p.is_dir()}
    parts |= {p for p in (ROOT / "lora").iterdir() if p.is_dir()}
    names = {p.name if p.is_file() else f"{p.name}/" for p in parts}
    assert names - {"__init__.py", "__pycache__/"} <= told


def test_the_walkthrough_shows_each():
    text = (ROOT / "examples/walkthrough.py").read_text("utf-8")
    said = re.findall(r'say\((\d), "([\w.]+)"', text)
    assert sorted(said) == [(str(n), name) for n, name in enumerate(NAMES, 1)]


@pytest.mark.parametrize(
    "heading, names",
    [
        ("Architectures", ARCHITECTURES),
        ("Weight types", QUANTS),
        ("File types", FILE_TYPES),
        ("Tokenizers", KINDS),
    ],
)
def test_the_formats_are_all_on_their_page(heading, names):
    section = re.search(rf"^## {heading}\n\n.*?\n\n(.*?)\n\n", FORMATS, re.M | re.S)[1]
    words = re.sub(r"\([^)]*\)", "", section)
    assert set(re.findall(r"[\w-]*\w", words)) - {"and"} == set(names)
