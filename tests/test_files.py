"""A file is replaced as a whole or not at all, and what goes wrong names the file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyggml.errors import PyggmlError
from pyggml.files import _remove_left, new_folder, replacing


def write(path, text):
    with replacing(path) as partial:
        partial.write_text(text)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_new_file_appears(tmp_path):
    write(tmp_path / "new.txt", "one")
    assert (tmp_path / "new.txt").read_text() == "one"
    assert names(tmp_path) == ["new.txt"]


def test_an_old_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "old.txt"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == path.parent, "a rename must not cross file systems"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["old.txt"]


def test_a_path_may_be_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("here.txt", "one")
    assert names(tmp_path) == ["here.txt"]


LEAVE = """
import os, signal, sys
from pyggml.files import new_folder, replacing
with replacing(sys.argv[1] + "/a.gguf") as partial, new_folder(sys.argv[1] + "/b"):
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows kills in another way")
def test_what_a_killed_run_left_is_removed_by_the_next_in_that_folder(tmp_path):
    left = subprocess.run([sys.executable, "-P", "-c", LEAVE, str(tmp_path)])
    assert left.returncode == -signal.SIGKILL and len(names(tmp_path)) == 2
    with replacing(tmp_path / "c.txt") as partial:
        partial.write_text("one")
        assert names(tmp_path) == [partial.name]


def test_what_others_are_writing_stays(tmp_path):
    """Of a process that runs, of another machine, and of no process."""
    with replacing(tmp_path / "mine") as mine:
        mine.write_text("one")
        suffix = mine.name.partition(".mine.")[2].removeprefix(str(os.getpid()))
        others = [f".x.{os.getppid()}{suffix}", ".x.999999-00000000.partial", "x.partial"]
        for name in others:
            (tmp_path / name).write_text("half")
        _remove_left.cache_clear()
        write(tmp_path / "next", "two")
        assert names(tmp_path) == sorted([*others, mine.name, "next"])


def refuse_renames(monkeypatch, target, times):
    """As Windows does while another program has the target open."""
    rename, refused = Path.replace, []

    def replace(self, to):
        if Path(to) == target and len(refused) < times:
            refused.append(to)
            raise PermissionError(13, "Access is denied")
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr("pyggml.files._PATIENCE", 0.5)
    return refused


@pytest.mark.quick
def test_a_rename_that_is_refused_is_tried_again(tmp_path, monkeypatch):
    path = tmp_path / "adapter.gguf"
    path.write_text("old")
    refused = refuse_renames(monkeypatch, path, 2)
    write(path, "new")
    assert len(refused) == 2 and path.read_text() == "new" and names(tmp_path) == [path.name]


@pytest.mark.quick
def test_what_cannot_be_renamed_is_kept_and_named(tmp_path, monkeypatch):
    path = tmp_path / "adapter.gguf"
    path.write_text("old")
    refuse_renames(monkeypatch, path, 1000)
    with pytest.raises(
        PyggmlError, match="cannot be replaced: Access is denied; another prog"
    ) as e:
        write(path, "new")
    kept = Path(str(e.value).rpartition(" kept in ")[2])
    assert path.read_text() == "old" and kept.read_text() == "new"
    _remove_left.cache_clear()
    write(tmp_path / "next", "two")
    assert names(tmp_path) == sorted([path.name, kept.name, "next"]), "no later run removes it"


@pytest.mark.quick
def test_a_folder_that_cannot_be_renamed_is_kept_too(tmp_path, monkeypatch):
    path = tmp_path / "adapter"
    refuse_renames(monkeypatch, path, 1000)
    with pytest.raises(PyggmlError, match="is kept in ") as e, new_folder(path) as partial:
        (partial / "a").write_text("new")
    kept = Path(str(e.value).rpartition(" kept in ")[2])
    assert (kept / "a").read_text() == "new" and names(tmp_path) == [kept.name]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, PyggmlError])
def test_an_interrupted_write_changes_nothing(error, tmp_path):
    path = tmp_path / "old.txt"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["old.txt"]


def test_a_write_that_never_began_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new.txt"):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(PyggmlError) as caught, replacing(path) as partial:
        partial.write_text("half")
        raise OSError(28, os.strerror(28))
    assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    ["missing/new.txt", "file.txt/new.txt", "x" * 300, "folder", "", ".", "nul\0byte", "n\0/a"],
    ids=[
        "no folder",
        "file as folder",
        "long name",
        "a folder",
        "empty",
        "dot",
        "nul",
        "nul folder",
    ],
)
def test_a_place_that_cannot_be_written_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("a file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PyggmlError, match="cannot be written"):
        write(name, "one")
    assert names(tmp_path) == ["file.txt", "folder"]


@pytest.mark.parametrize("make", ["mkdir", "mkfifo"])
def test_a_folder_or_device_is_refused_before_the_work(make, tmp_path):
    if not hasattr(os, make):
        pytest.skip(f"this system (Windows) has no os.{make}")
    getattr(os, make)(tmp_path / "there")
    before = (tmp_path / "there").stat()
    with (
        pytest.raises(PyggmlError, match="there: cannot be written: it is a (folder|device)"),
        replacing(tmp_path / "there"),
    ):
        raise AssertionError("the work began")
    assert (tmp_path / "there").stat().st_mode == before.st_mode


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with (
        pytest.raises(PyggmlError, match=r"new\.txt: cannot be written"),
        replacing(tmp_path / "new.txt"),
    ):
        pass


def test_two_writers_do_not_share_a_partial_file(tmp_path, monkeypatch):
    seen = []
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        with replacing(tmp_path / "a.txt") as partial:
            seen.append(partial)
            partial.write_text("x")
    assert len(set(seen)) == 2


def test_what_was_written_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    calls = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), sync(handle))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), rename(self, to))[1]
    )
    write(tmp_path / "a.txt", "one")
    assert calls[:2] == ["fsync", "rename"]
