"""Tests lie in folders named as the rooms of the code, and `pytest -m quick` runs some of each."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
NO_ROOMS = {"golden", "support"}

pytestmark = pytest.mark.quick


def folders(parent):
    return {p.name for p in parent.iterdir() if p.is_dir() and p.name[0] not in "._"}


def test_every_room_has_a_folder_of_tests():
    assert folders(HERE) - NO_ROOMS == folders(HERE.parent / "pyggml") | {"lora", "cli"}


def test_every_folder_of_tests_has_quick_ones():
    on_a_card = HERE / "backends/card"  # collected there, or in a process of their own
    with_tests = {p.parent for p in HERE.rglob("test_*.py")} - {on_a_card}
    quick = {p.parent for p in HERE.rglob("test_*.py") if has_quick_tests(p)}
    assert with_tests == quick


def has_quick_tests(path):
    text = path.read_text("utf-8")
    return "pytest.mark.quick" in text or "from cases import cases" in text
