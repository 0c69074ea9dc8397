"""One run at a time in a folder, and for one output."""

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.skipif(sys.platform == "win32", reason="no open file is removed there")
def test_a_lock_that_its_holder_removes_while_it_is_opened_is_made_anew(
    place, tmp_path, monkeypatch
):
    really_open, removed = os.open, []

    def open_as_it_goes(path, *how):
        handle = really_open(path, *how)
        if not removed:
            removed.append(path)
            Path(path).unlink()
        return handle

    monkeypatch.setattr(os, "open", open_as_it_goes)
    with lock.hold(place):
        assert len(removed) == 1 and len(locks(tmp_path)) == 1


@pytest.mark.parametrize("text", ["", "0", "4294967296"])
def test_a_place_is_held_by_a_lock_whatever_number_stands_there(text, place, tmp_path):
    """Numbers of processes mean nothing in another container."""
    assert not lock.is_held(place)
    with lock.hold(place):
        (path,) = tmp_path.rglob("*.lock")
        path.write_text(text)
        assert lock.is_held(place)
        with pytest.raises(PyggmlError, match="is in use by process"), lock.hold(place):
            pass
    path.write_text(str(os.getpid()))
    assert not lock.is_held(place), "its process holds nothing"


def plant(path, what, outside):
    """What an attacker, or a user, may have put where a lock belongs."""
    if what == "a link":
        path.symlink_to(outside)
    elif what == "a second name":
        os.link(outside, path)
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        path.write_bytes(outside.read_bytes())


@pytest.mark.skipif(sys.platform == "win32", reason="no such links and pipes")
@pytest.mark.parametrize("what", ["a link", "a second name", "a pipe", "a folder", "a file"])
def test_what_is_no_lock_file_is_refused_and_stays(what, place, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "theirs"
    outside.write_bytes(b"not a number")
    path = place / ".lock" if place.is_dir() else place.with_name(".place.lock")
    plant(path, what, outside)
    wanted = "lock: (cannot be made|was not made by pyggml)"
    with pytest.raises(PyggmlError, match=wanted), lock.hold(place):
        pass
    assert outside.read_bytes() == b"not a number" and os.path.lexists(path)


@pytest.mark.skipif(sys.platform == "win32", reason="no such links")
def test_a_place_and_a_link_to_it_are_one(place, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(place)
    with lock.hold(link), pytest.raises(PyggmlError, match="is in use"), lock.hold(place):
        pass


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

    monkeypatch.setattr(lock, "try_lock", refused)
    with lock.hold(tmp_path):
        assert locks(tmp_path)
