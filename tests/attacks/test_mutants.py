"""A planted mutant dies, one without effect survives, and a run that is continued goes on."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from attacks.mutants.changes import ROOT, draw, mutants_of
from attacks.mutants.report import read_results, report

FIT, OPTIM = "pyggml/alloc/fit.py", "pyggml/ops/optim.py"
# In a process of its own, which has not imported pyggml.
TRY = """
import json, sys
from pathlib import Path
from attacks.mutants.__main__ import try_all
from attacks.mutants.changes import draw, mutants_of
from attacks.mutants.tests import Plan

results, file, test, *words = sys.argv[1:]
plan = Plan(("tests",), only_files=frozenset([test]))
wanted = [m for m in mutants_of(file) if str(m).partition(" ")[2] in words]
try_all(wanted or draw([file], int(words[0]), 0), {}, Path(results), 60.0, plan, [file])
"""


def results_of(path, file, test, *words):
    """What is in the file of results after these mutants were tried, with the tests of a file."""
    command = [sys.executable, "-c", TRY, path, file, test, *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_planted_mutants_die_and_one_without_effect_survives(tmp_path):
    rows = results_of(
        tmp_path / "results",
        FIT,
        "tests/alloc/test_fit.py",
        "constant: 64 → 65",  # of the module: it is imported anew
        "deletion: self._sizes[i] -= size → pass",
        "comparison: self._n_waiting > self._room → self._n_waiting >= self._room",
        "comparison: i > 0 → i >= 0",  # the last free block cannot end where the first one starts
    )
    assert [row["end"] for row in rows] == ["killed"] * 3 + ["survived"]
    assert rows[1]["by"].startswith("tests/alloc/test_fit.py::")  # whichever is the quickest
    n_tried, n = rows[-1]["tests"].split(" of ")
    assert n_tried == n != "0"


def test_a_mutant_of_a_kernel_is_compiled_and_not_kept(tmp_path):
    """Of one with an effect and one without: the cache has neither afterwards."""
    test = "tests/ops/test_optim.py"
    dead = "operator: piece[j] *= factor → piece[j] /= factor"
    for i in range(2):
        (row,) = results_of(tmp_path / f"results {i}", OPTIM, test, dead)
        assert row["end"] == "killed"
        assert row["by"].startswith(test)


def test_a_mutant_that_hangs_or_ends_the_process_is_dead():
    from attacks.mutants.fork import in_fork

    assert in_fork(lambda tell: [*iter(int, 1)], lambda told: 0.5).why == "hung"
    assert in_fork(lambda tell: os.abort(), lambda told: 60.0).why == "crashed"
    ended = in_fork(lambda tell: tell({"test": "a"}), lambda told: 60.0)
    assert (ended.why, ended.told[1:]) == ("", [{"test": "a"}, {"end": ""}])


@pytest.mark.quick
def test_a_seed_draws_the_same_lines_and_more_of_them():
    files = [FIT, OPTIM]
    some = draw(files, 30, 3)
    assert some == draw(files, 30, 3) == draw(files, 60, 3)[:30] != draw(files, 30, 4)
    assert len({(m.file, m.line) for m in some}) == 30
    assert {m.file for m in some} == set(files)


@pytest.mark.quick
def test_what_was_tried_is_not_tried_again(tmp_path):
    drawn = draw([FIT], 4, 0)
    path = tmp_path / "results"
    ends = ["killed", "survived", "unreached", "hung"]
    rows = [{"mutant": m.name, "end": end} for m, end in zip(drawn, ends, strict=True)]
    rows.append({"mutant": "of other sources", "end": "killed"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert list(read_results(path, drawn, again=False)) == [m.name for m in drawn]
    assert list(read_results(path, drawn, again=True)) == [drawn[0].name, drawn[3].name]
    words = report(drawn, read_results(path, drawn, again=False), {"alloc": "pyggml/alloc"})
    assert "alloc     4 drawn, 4 tried: 50.0 % died (1 killed, 1 hung" in words
    assert str(drawn[1]) in words
    assert str(drawn[0]) not in words


SOURCE = '''"""A docstring of 1 line."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    N = 1
__slots__ = (1,)

def f(a: int = 1, *, b: "list[1]") -> "tuple[2]":
    """Another."""
    if a < 2 and b:
        raise ValueError(f"{a + 1} is not {b}")
    for i, j in zip(a, b, strict=True):
        a[i:j] += g(i, self.b.add(i, j))
    return min(a, b)
'''


@pytest.mark.quick
def test_what_is_changed_and_what_is_not(tmp_path):
    (tmp_path / "f.py").write_text(SOURCE, "utf-8")
    mutants = list(mutants_of("f.py", tmp_path))
    assert Counter(f"{m.line} {m.kind}" for m in mutants) == {
        "8 constant": 2,
        "10 condition": 1,
        "10 operator": 1,
        "10 comparison": 1,
        "10 constant": 2,
        "11 deletion": 1,
        "12 arguments": 1,
        "13 operator": 1,
        "13 deletion": 1,
        "13 slice": 2,
        "13 arguments": 1,
        "14 return": 1,
    }
    assert [m.in_function for m in mutants] == [False] * 2 + [True] * 13
    assert {m.lines for m in mutants} == {(8, 8), (10, 10), (11, 11), (12, 12), (13, 13), (14, 14)}
