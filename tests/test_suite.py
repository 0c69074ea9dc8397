"""The suite itself: folders named as the rooms of the code, quick tests in each, and
last lines that say what was skipped for want of an extra."""

import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from extras import EXTRAS, summary
from kinds import KINDS
from processes import python
from tiny_models import zero_parts

from pyggml.graph.dtypes import I32
from pyggml.graph.tensor import zeros
from pyggml.models import ARCHITECTURES, Inputs, build_loss

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


def test_kinds_of_architectures_stand_for_all():
    """Each pair of an op and one that reads its result is in one of them."""
    pairs = {}
    for name in ARCHITECTURES:
        targets, share = zeros((9,), I32), zeros((9,))
        graph = build_loss(zero_parts(name, n_vocab=11), Inputs.empty(9), targets, share)
        pairs[name] = {(s.op and s.op.name, t.op.name) for t in graph.nodes for s in t.src}
    among_kinds = set().union(*(pairs[name] for name in KINDS))
    assert not {name for name in pairs if pairs[name] - among_kinds}


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
    done = python("-c", WITHOUT, "-q", "-p", "no:cacheprovider", *chosen)
    *_, first, second, _ = done.stdout.splitlines()
    assert first == "skipped without the extra mpi: 1 (pip install '.[mpi]')"
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


def small_suite(folder, text):
    """A suite with this one's conftest.py, whose long files have this text; their names."""
    shutil.copytree(HERE / "support", folder / "tests/support")
    shutil.copy(HERE / "conftest.py", folder / "tests")
    shutil.copy(HERE.parent / "pyproject.toml", folder)
    files = re.findall(r'^    "(.*)",$', (HERE / "conftest.py").read_text("utf-8"), re.M)
    for file in (folder / "tests" / name for name in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return files


@pytest.mark.skipif(os.cpu_count() < 2, reason="one core takes one process")
def test_the_whole_suite_runs_in_three_processes_and_a_file_in_one(tmp_path):
    """In a small suite with this one's conftest.py; its processes start no others."""
    files = small_suite(tmp_path, RECORDS)
    assert len(files) > 4, "the long files"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert f"{2 * len(files)} passed" in done.stdout, done.stdout + done.stderr
    assert {p.read_text() for p in tmp_path.rglob("*.worker")} == {"gw0", "gw1", "gw2"}


WITH = """
import sys, types, pytest
sys.modules["igraph"] = {}
sys.exit(pytest.main(["-q", *sys.argv[1:]]))
"""
WANTS = """
from extras import need

def test_wants():
    need("igraph")

def test_does_not():
    pass
"""


def test_what_was_skipped_for_want_of_an_extra_runs_alone_when_it_is_there(tmp_path):
    """A test of a file, and a file as a whole; of what was not skipped nothing."""
    small_suite(tmp_path, "")
    (tmp_path / "tests/test_some.py").write_text(WANTS)
    (tmp_path / "tests/test_all.py").write_text(WANTS + "\n\nneed('igraph')\n")
    (tmp_path / "tests/test_none.py").write_text("def test_does_not():\n    pass\n")
    first = suite_of(tmp_path, WITH.format("None"))
    assert "2 passed, 2 skipped" in first
    for _ in range(2):  # the second run reads what the first whole one has left
        assert "3 passed" in suite_of(
            tmp_path, WITH.format("types.ModuleType('igraph')"), "--skipped"
        )


def suite_of(folder, code, *arguments):
    """What the small suite in this folder says at its end."""
    done = python("-c", code, "-n", "0", *arguments, cwd=folder)
    return done.stdout + done.stderr
