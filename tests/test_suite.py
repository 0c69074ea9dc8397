"""The suite itself: folders named as the rooms of the code, quick tests in each, and
last lines that say what was skipped for want of an extra."""

import os
import re
import shutil
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
    rooms = folders(HERE.parent / "pyggml") | {"lora", "cli", "attacks"}
    assert folders(HERE) - NO_ROOMS == rooms


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


RECORDS = """
import os
from pathlib import Path

def test_first():
    Path(__file__).with_suffix(".worker").write_text(os.environ["PYTEST_XDIST_WORKER"])

def test_second():
    assert Path(__file__).with_suffix(".worker").read_text() == os.environ["PYTEST_XDIST_WORKER"]
"""


@pytest.mark.skipif(os.cpu_count() < 2, reason="one core takes one process")
def test_the_whole_suite_runs_in_two_processes_and_a_file_in_one(tmp_path):
    """In a small suite with this one's conftest.py; its processes start no others."""
    shutil.copytree(HERE / "support", tmp_path / "tests/support")
    shutil.copy(HERE / "conftest.py", tmp_path / "tests")
    shutil.copy(HERE.parent / "pyproject.toml", tmp_path)
    files = re.findall(r'^    "(.*)",$', (HERE / "conftest.py").read_text("utf-8"), re.M)
    assert len(files) > 4, "the long files"
    for file in (tmp_path / "tests" / name for name in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(RECORDS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert f"{2 * len(files)} passed" in done.stdout, done.stdout + done.stderr
    assert {p.read_text() for p in tmp_path.rglob("*.worker")} == {"gw0", "gw1"}
