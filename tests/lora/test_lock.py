"""One run at a time in a folder, and for one output."""

import os
import subprocess
import sys

import psutil
import pytest

from pyggml.errors import PyggmlError
from pyggml.lora.trainer import lock

HOLDER = """
import sys
from pathlib import Path
from pyggml.lora.trainer import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """holder(place) -> a process that holds it until its input ends."""
    processes = []

    def start(place):
        command = [sys.executable, "-P", "-c", HOLDER, str(place)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        assert processes[-1].stdout.readline() == "held\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(params=["a folder", "a file", "a file to be"])
def place(request, tmp_path):
    path = tmp_path / "place"
    if request.param == "a folder":
        path.mkdir()
    elif request.param == "a file":
        path.write_bytes(b"older")
    return path


def locks(folder):
    return [p.name for p in folder.rglob("*.lock")]


def test_the_second_is_refused_by_the_number_of_the_first(place, holder, tmp_path):
    first = holder(place)
    wanted = rf"place: is in use by process {first.pid}: wait for its end, or name another"
    n_open = psutil.Process().num_fds() if sys.platform != "win32" else 0
    with pytest.raises(PyggmlError, match=wanted), lock.hold(place):
        pass
    if sys.platform != "win32":
        assert psutil.Process().num_fds() == n_open
    assert len(locks(tmp_path)) == 1, "the first one's lock stays"
    first.communicate("", timeout=300)
    assert locks(tmp_path) == []
    with lock.hold(place):
        pass


def test_the_lock_of_a_process_that_was_killed_is_taken_over(place, holder, tmp_path):
    first = holder(place)
    first.kill()
    first.wait()
    assert len(locks(tmp_path)) == 1
    with lock.hold(place):
        (path,) = tmp_path.rglob("*.lock")
        assert path.read_text() == str(os.getpid())
    assert locks(tmp_path) == []


@pytest.mark.parametrize("text", ["", "0", "-1", "4294967296", "x"])
def test_a_lock_file_with_no_process_s_number_names_none(text, place, tmp_path):
    with lock.hold(place):
        (path,) = tmp_path.rglob("*.lock")
        assert lock.holder(place) == os.getpid()
        path.write_text(text)
        assert lock.holder(place) is None


def test_a_lock_ends_with_an_error_too(place, tmp_path):
    with pytest.raises(ZeroDivisionError), lock.hold(place):
        raise ZeroDivisionError
    assert locks(tmp_path) == []


def test_a_place_that_cannot_be_locked_is_named(tmp_path):
    missing = tmp_path / "none" / "place"
    with pytest.raises(PyggmlError, match="place.lock: cannot be made: "), lock.hold(missing):
        pass


def test_a_disk_without_locks_is_used_without(tmp_path, monkeypatch):
    def refused(handle):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock, "_lock", refused)
    with lock.hold(tmp_path):
        assert locks(tmp_path)
