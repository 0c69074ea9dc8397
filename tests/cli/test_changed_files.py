"""A model's file that is changed while it is in use: a sentence, an exit code, no half answer."""

import io
import os
import shutil
import sys

import pytest
from computing import COMPUTE, data_files, words
from processes import python

import pyggml.requantize  # noqa: F401  # whose plan is changed
from pyggml.runtime import Program


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def write_over(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    os.utime(path, ns=(1, 1))  # clocks of file systems are coarse


def grow(path):
    with path.open("ab") as file:
        file.write(b"1")


CHANGES = (cut, write_over, grow)


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copy(tiny, tmp_path / "model.gguf")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("command", COMPUTE)
def test_every_command_sees_it(pyggml, copy, text, tmp_path, command, change, monkeypatch):
    """Changed during the first pass: what it and later ones compute is not taken for an answer."""
    run, n_runs = Program.__call__, []

    def changing(self):
        n_runs.append(1)
        if len(n_runs) == 1:
            change(copy)
        run(self)

    monkeypatch.setattr(Program, "__call__", changing)
    monkeypatch.setattr("sys.stdin", io.StringIO("the\n"))
    files = data_files(text, tmp_path) | {"MODEL": copy}
    ended = pyggml(*words(command, files))
    assert ended.code == 2 and "model.gguf: was changed while it was in use: it" in ended.err
    assert "Traceback" not in ended.err and not files["OUT"].exists()


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_made_of_it(pyggml, copy, tmp_path, change, monkeypatch):
    """`quantize`, as `merge`, reads tensor by tensor."""
    plan = sys.modules["pyggml.requantize.requantize"]._Plan
    make = plan.tensor

    def changing(self, name, *given):
        if name == "output.weight":
            change(copy)
        return make(self, name, *given)

    monkeypatch.setattr(plan, "tensor", changing)
    ended = pyggml("quantize", copy, tmp_path / "out.gguf", "Q8_0")
    assert ended.code == 2 and "was changed while it was in use" in ended.err
    assert not (tmp_path / "out.gguf").exists()


# -- pages that are gone ------------------------------------------------------------------------

READ = """
import os, sys, threading
from pyggml import gguf
file = gguf.open(sys.argv[1])
data = [file.data(name) for name in file.tensors]
os.truncate(sys.argv[1], 4096)
read = lambda: print(sum(float(a.sum()) for a in data))
if sys.argv[2] == "thread":
    thread = threading.Thread(target=read); thread.start(); thread.join()
else:
    read()
"""
OTHER = """
import mmap, os, sys
from pyggml import gguf
file = gguf.open(sys.argv[1])
with open(sys.argv[1] + ".other", "w+b") as other:
    other.truncate(1 << 16)
    mapped = mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_READ)
    other.truncate(0)
    mapped[5000]
"""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the handler is Linux'")


def python_of(code, *arguments):
    return python("-P", "-c", code, *arguments)


@linux
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_read_behind_the_new_end_is_said(copy, where):
    ended = python_of(READ, copy, where)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"pyggml: {copy}: was cut short while it was in use\n"


@linux
def test_other_errors_of_the_bus_end_a_process_as_before(copy):
    ended = python_of(OTHER, copy)
    assert ended.returncode == -7 and ended.stderr == ""
