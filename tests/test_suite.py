"""The suite itself: folders named as the rooms of the code, quick tests in each, and
last lines that say what was skipped for want of an extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from extras import EXTRAS, summary

HERE = Path(__file__).parent
NO_ROOMS = {"golden", "support"}


def folders(parent):
    return {p.name for p in parent.iterdir() if p.is_dir() and p.name[0] not in "._"}


@pytest.mark.quick
def test_every_room_has_a_folder_of_tests():
    assert folders(HERE) - NO_ROOMS == folders(HERE.parent / "pyggml") | {"lora", "cli"}


@pytest.mark.quick
def test_every_folder_of_tests_has_quick_ones():
    on_a_card = HERE / "backends/card"  # collected there, or in a process of their own
    with_tests = {p.parent for p in HERE.rglob("test_*.py")} - {on_a_card}
    quick = {p.parent for p in HERE.rglob("test_*.py") if has_quick_tests(p)}
    assert with_tests == quick


def has_quick_tests(path):
    text = path.read_text("utf-8")
    return "pytest.mark.quick" in text or "from cases import cases" in text


@pytest.mark.quick
def test_the_extras_that_tests_want_are_extras():
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(EXTRAS.values()) <= project["optional-dependencies"].keys()


@pytest.mark.quick
def test_reasons_are_counted_by_the_extra_that_they_name():
    reasons = ["no: pip install '.[mpi]' and more", "pip install 'pyggml[cuda]'", "too early"]
    assert list(summary([*reasons, reasons[0]])) == [
        "skipped without the extra cuda: 1 (pip install '.[cuda]')",
        "skipped without the extra mpi: 2 (pip install '.[mpi]')",
    ]


WITHOUT = (
    "import sys, pytest;sys.modules.update(mpi4py=None, igraph=None);pytest.main(sys.argv[1:])"
)


def test_a_run_ends_with_the_extras_that_its_tests_want():
    """Also where there is an mpiexec, but no mpi4py."""
    chosen = (
        "tests/lora/test_ranks.py",
        "-k",
        "error_of_one",
        "tests/cli/view/test_pictures.py",
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "-q", "-p", "no:cacheprovider", *chosen],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    *_, first, second, _ = done.stdout.splitlines()
    assert first == "skipped without the extra mpi: 4 (pip install '.[mpi]')"
    assert second == "skipped without the extra views: 1 (pip install '.[views]')"
    assert "passed" not in done.stdout and "failed" not in done.stdout
