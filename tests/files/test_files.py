"""A file is replaced as a whole or not at all, and what goes wrong names the file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyggml.errors import PyggmlError
from pyggml.files import new_folder, open_regular, open_to_append, replacing
from pyggml.files.writing import _remove_left


def write(path, text):
    with replacing(path) as out:
        out.write(text.encode())


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_new_file_appears(tmp_path):
    write(tmp_path / "new.txt", "one")
    assert (tmp_path / "new.txt").read_text() == "one"
    assert names(tmp_path) == ["new.txt"]


def test_an_old_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "old.txt"
    path.write_text("old")
    with replacing(path) as out:
        out.write(b"new")
        assert path.read_text() == "old"
        assert len(names(tmp_path)) == 2, "beside it: a rename must not cross file systems"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["old.txt"]


def test_a_path_may_be_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("here.txt", "one")
    assert names(tmp_path) == ["here.txt"]


LEAVE = """
import os, signal, sys
from pyggml.files import new_folder, replacing
with replacing(sys.argv[1] + "/a.gguf") as out, new_folder(sys.argv[1] + "/b"):
    out.write(b"half")
    out.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows kills in another way")
def test_what_a_killed_run_left_is_removed_by_the_next_in_that_folder(tmp_path):
    left = subprocess.run([sys.executable, "-P", "-c", LEAVE, str(tmp_path)])
    assert left.returncode == -signal.SIGKILL and len(names(tmp_path)) == 2
    with replacing(tmp_path / "c.txt"):
        assert len(names(tmp_path)) == 1


HOLD = """
import sys, time
from pyggml.files import replacing
with replacing(sys.argv[1] + "/theirs") as out:
    out.write(b"half")
    out.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nobody can remove an open file there")
def test_only_what_is_ours_and_left_is_removed(tmp_path):
    """Of a living process, whatever its number, of another machine, a copy, a file of such a name,
    a link: all stay. What was left, alone, goes."""
    command = [sys.executable, "-P", "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"writing\n"
        (name,) = names(tmp_path)
        living = tmp_path / name
        others = [living.with_name(name.replace(".theirs.", ".copy."))]
        others[0].write_bytes(living.read_bytes())
        others.append(living.with_name(f".link{name}"))
        others[1].symlink_to(living)
        elsewhere = living.with_name(name.rpartition("-")[0] + "-00000000.partial")
        elsewhere.write_bytes(b"of another machine")
        stays = sorted(p.name for p in [living, *others, elsewhere])
        _remove_left.cache_clear()
        write(tmp_path / "next", "two")
        assert names(tmp_path) == sorted([*stays, "next"])
        process.kill()
        process.wait()
    _remove_left.cache_clear()
    write(tmp_path / "next", "three")
    stays.remove(name)
    assert names(tmp_path) == sorted([*stays, "next"])


@pytest.mark.skipif(sys.platform == "win32", reason="no such modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_replaced_file_keeps_its_mode(mode, tmp_path):
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(mode)
    write(path, "new")
    assert path.stat().st_mode & 0o7777 == mode and path.read_text() == "new"
    write(tmp_path / "another", "new")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "another").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.skipif(sys.platform == "win32", reason="no such links")
@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_is_a_link_stays_one(there, tmp_path):
    (tmp_path / "disk").mkdir()
    link, path = tmp_path / "link", tmp_path / "disk" / "real"
    link.symlink_to(path)
    if there:
        path.write_text("old")
    write(link, "new")
    assert link.is_symlink() and path.read_text() == "new" and names(tmp_path / "disk") == ["real"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_a_link_of_another_user_is_refused(tmp_path):
    link, path = tmp_path / "link", tmp_path / "theirs"
    path.write_text("old")
    link.symlink_to(path)
    os.lchown(link, 12345, 12345)
    with pytest.raises(PyggmlError, match="link: cannot be written: it is a link that belongs to"):
        write(link, "new")
    assert path.read_text() == "old"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
@pytest.mark.parametrize("what", ["a pipe", "a folder", "a device", "a link to a pipe"])
def test_only_regular_files_are_opened_and_nothing_waits(what, tmp_path):
    path = tmp_path / "there"
    if what == "a folder":
        path.mkdir()
    elif what == "a device":
        path = Path("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
        path = path if "link" in what else tmp_path / "pipe"
    with pytest.raises(OSError, match="it is a (folder|pipe or device), wanted a file"):
        open_regular(path)


@pytest.mark.skipif(sys.platform == "win32", reason="no such names")
def test_what_has_another_name_is_not_added_to(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"one ")
    with open_to_append(path) as file:
        file.write(b"two")
    assert path.read_bytes() == b"one two"
    os.link(path, other)
    with pytest.raises(OSError, match="has other names"):
        open_to_append(path)


def refuse_renames(monkeypatch, target, times):
    """As Windows does while another program has the target open."""
    rename, refused = Path.replace, []

    def replace(self, to):
        if Path(to) == target and len(refused) < times:
            refused.append(to)
            raise PermissionError(13, "Access is denied")
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr("pyggml.files.writing._PATIENCE", 0.5)
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
    with pytest.raises(error), replacing(path) as out:
        out.write(b"half")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["old.txt"]


def test_a_write_that_never_began_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new.txt"):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(PyggmlError) as caught, replacing(path) as out:
        out.write(b"half")
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
        pytest.raises(PyggmlError, match="there: cannot be written: it is a (folder|pipe or)"),
        replacing(tmp_path / "there"),
    ):
        raise AssertionError("the work began")
    assert (tmp_path / "there").stat().st_mode == before.st_mode


def test_two_writers_do_not_share_a_partial_file(tmp_path):
    with replacing(tmp_path / "a.txt") as one, replacing(tmp_path / "a.txt") as two:
        one.write(b"one")
        two.write(b"two")
        assert len(names(tmp_path)) == 2
    assert (tmp_path / "a.txt").read_bytes() == b"one", "the last to end"


def test_what_was_written_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    calls = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), sync(handle))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), rename(self, to))[1]
    )
    write(tmp_path / "a.txt", "one")
    assert calls[:2] == ["fsync", "rename"]
