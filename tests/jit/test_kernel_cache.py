"""Where compiled kernels are kept, and what happens where that is not possible: a note, no more."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from numba.core import config
from numba.core.caching import IndexDataCacheFile
from processes import ROOT, printed

from pyggml.jit import CACHE
from pyggml.jit.cache import CODE_SETTINGS, writable_folder
from pyggml.jit.workarounds import _sum

# Compiles one kernel, uses it, and prints where Numba looks for caches.
SCRIPT = """
from numba.core import config
from pyggml.jit.simd import key_of
key_of(1.0)
print(config.CACHE_DIR)
"""
# Compiles a kernel that calls another; prints what the one is before and after, and their results.
LINKED = """
import numba
from pyggml.jit.simd import key_of
own = key_of(1.0)
library = next(iter(key_of.overloads.values())).library
before = library._shared_module
result = numba.njit(lambda x: key_of(x))(1.0)
print(before is None, library._shared_module is None, result == own)
"""
# The same without a kernel.
WHERE = "import pyggml.jit\nfrom numba.core import config\nprint(config.CACHE_DIR)"
ANYWHERE = ("generic", "numpy")  # instruction sets of any CPU
CHECKED = int(bool(config.BOUNDSCHECK))
NOTE = "the cache of compiled kernels cannot be written"


@pytest.fixture
def run(tmp_path):
    """Runs a script in a process of its own; what it printed and warned."""

    def call(script, **environment):
        temporary = tmp_path / "temporary"
        temporary.mkdir(exist_ok=True)
        base = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
        ended = subprocess.run(
            [sys.executable, "-P", "-c", script],
            env=base | {"TMPDIR": str(temporary)} | environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
        assert not list(temporary.iterdir()), "what is temporary is removed"
        return ended.stdout.strip(), ended.stderr

    return call


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME names the folder")


def test_kernels_are_kept_in_the_users_cache_folder(run, tmp_path):
    folder, warned = run(SCRIPT, XDG_CACHE_HOME=str(tmp_path))
    assert folder.startswith(str(tmp_path / "pyggml")) and warned == ""
    assert list((tmp_path / "pyggml").rglob("*.nbi"))
    again, _ = run(WHERE, XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "own"))
    assert again == str(tmp_path / "own" / Path(folder).name)


def test_kernels_of_another_instruction_set_have_a_folder_of_their_own(run, tmp_path):
    """Also where the user names one: made for other vectors, they would write past arrays."""
    folders = {run(WHERE, PYGGML_ISA=isa, NUMBA_CACHE_DIR=str(tmp_path))[0] for isa in ANYWHERE}
    assert len(folders) == len(ANYWHERE)


def test_a_cached_kernel_is_parsed_once_another_is_linked_with_it(run, tmp_path):
    run(SCRIPT, XDG_CACHE_HOME=str(tmp_path))
    assert run(LINKED, XDG_CACHE_HOME=str(tmp_path))[0] == "True False True"


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_a_folder_that_cannot_be_made(run, tmp_path, variable):
    (tmp_path / "file").write_text("")
    folder, warned = run(WHERE, **{variable: str(tmp_path / "file")})
    assert folder.startswith(str(tmp_path / "temporary" / "pyggml-"))
    assert warned.count(NOTE) == 1 and str(tmp_path / "file") in warned


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_folder_that_may_not_be_written(run, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert NOTE in run(SCRIPT, XDG_CACHE_HOME=str(tmp_path / "closed"))[1]


BROKEN = {
    "no home": "import pathlib\ndef home(): raise RuntimeError('none')\npathlib.Path.home = home",
    "full disk": "import shutil\nfrom types import SimpleNamespace\n"
    "shutil.disk_usage = lambda path: SimpleNamespace(free=1000)",
    "no place at all": "import tempfile\ndef none(**given): raise PermissionError(13, 'denied')\n"
    "tempfile.mkdtemp = tempfile.TemporaryFile = none",
}


@pytest.mark.parametrize("patch", BROKEN.values(), ids=list(BROKEN))
def test_a_machine_without_a_place_for_them(run, patch):
    environment = {"XDG_CACHE_HOME": ""}  # which counts as not set
    assert NOTE in run(patch + SCRIPT, **environment)[1]


def give_away(folder):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 65534, 65534)


EXPOSE = {
    "root": lambda leaf: leaf.parent.chmod(0o777),
    "leaf": lambda leaf: leaf.chmod(0o775),
    "another's root": lambda leaf: give_away(leaf.parent),
    "another's leaf": give_away,
}


@pytest.mark.quick
@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
@pytest.mark.parametrize("expose", EXPOSE.values(), ids=list(EXPOSE))
def test_a_folder_that_others_may_write_is_refused(monkeypatch, tmp_path, variable, expose):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "root"))
    leaf = writable_folder()
    assert leaf.is_relative_to(tmp_path) and leaf.stat().st_mode & 0o777 == 0o700
    expose(leaf)
    with pytest.warns(RuntimeWarning, match="compiled kernels is refused .*root.*, so every run"):
        assert not writable_folder().is_relative_to(tmp_path)


def test_everybodys_folder_will_do_if_it_is_sticky(monkeypatch, tmp_path):
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert writable_folder().is_relative_to(tmp_path)


def test_a_variable_of_numba_s_that_changes_moves_no_kernels(monkeypatch):
    held = "CACHE_DIR", "CPU_FEATURES", *CODE_SETTINGS
    before = [getattr(config, name) for name in held]
    other = {"CACHE_DIR": "elsewhere", "LLVM_REFPRUNE_FLAGS": "", "BOUNDSCHECK": str(1 - CHECKED)}
    for name in held:
        variable = "DEBUGINFO" if name == "DEBUGINFO_DEFAULT" else name
        monkeypatch.setenv(f"NUMBA_{variable}", other.get(name, "0"))
    config.reload_config()
    assert before == [getattr(config, name) for name in held]


@pytest.mark.quick
@pytest.mark.parametrize("name", CODE_SETTINGS)
def test_kernels_of_other_settings_have_a_folder_of_their_own(monkeypatch, tmp_path, name):
    """Without bounds checks a loop is made of vectors, which round otherwise."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    before = writable_folder()
    monkeypatch.setattr(config, name, "other")
    assert writable_folder() != before


class Planted:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def entry():
    """A cache entry in this process's folder, its index and its file of machine code."""
    if CACHE is None:
        pytest.skip("this machine keeps no kernels")
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        file = IndexDataCacheFile(folder, "kernel", "stamp")
        file.save("key", "code")
        yield file, *(next(Path(folder).glob(f"*.{suffix}")) for suffix in ("nbi", "nbc"))


@pytest.mark.quick
@pytest.mark.parametrize("which", [0, 1], ids=["index", "code"])
def test_a_planted_file_is_never_unpickled(entry, tmp_path, which):
    """A file that others may write, in a folder that is closed by now."""
    file, *paths = entry
    assert file.load("key") == "code" and paths[which].stat().st_mode & 0o777 == 0o600
    content = pickle.dumps(Planted(tmp_path / "mark"))
    paths[which].write_bytes(content + _sum(str(paths[which]), content))
    paths[which].chmod(0o666)
    with pytest.warns(RuntimeWarning, match="others may write there, so this kernel is compiled"):
        assert file.load("key") is None
    assert not (tmp_path / "mark").exists()


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE = {"empty": lambda _: b"", "cut": lambda c: c[: len(c) // 2], "flipped": flip}


@pytest.mark.quick
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
@pytest.mark.parametrize("which", [0, 1], ids=["index", "code"])
def test_a_damaged_file_counts_as_missing(entry, damage, which):
    file, *paths = entry
    paths[which].write_bytes(damage(paths[which].read_bytes()))
    assert file.load("key") is None
    file.save("key", "new code")
    assert file.load("key") == "new code"


@pytest.mark.quick
@pytest.mark.parametrize("which", [0, 1], ids=["index", "code"])
def test_a_file_in_place_of_another_counts_as_missing(entry, which):
    """Whole as it is."""
    file, *paths = entry
    paths[which].write_bytes(paths[1 - which].read_bytes())
    assert file.load("key") is None


def test_damaged_kernels_are_compiled_anew_in_silence(run, tmp_path):
    run(SCRIPT, NUMBA_CACHE_DIR=str(tmp_path))
    files = [*tmp_path.rglob("*.nbc")]
    for path in files:
        path.write_bytes(b"")
    assert files and run(SCRIPT, NUMBA_CACHE_DIR=str(tmp_path))[1] == ""
    assert all(path.read_bytes() for path in files)


SUMS = """
import hashlib
import numpy as np
from pyggml.ops.loss.head_slices import _TAKE_SLICE
rng = np.random.default_rng(0)
z, o = rng.standard_normal((7, 1003), np.float32), np.zeros((7, 4), np.float32)
targets = rng.integers(0, 1003, (7, 1)).astype(np.int32)
m, norm, own = np.zeros((3, 7), np.float32)
z *= 3
_TAKE_SLICE[False](z, m, norm, own[:, None], o, targets, 0, np.float32(1))
print(hashlib.sha256(z.tobytes() + norm.tobytes()).hexdigest())
"""


def test_the_process_that_compiles_a_kernel_gives_the_bits_of_later_ones(tmp_path):
    """A parallel loop with a sum: what ran and what was kept have added in another order."""
    found = [printed(SUMS, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert list(tmp_path.rglob("*.nbc")), "the first process kept its kernel"
    assert found[0] == found[1]


LISTED = """
from numba.core import event
class Listener(event.Listener):
    def on_start(self, e): print(e.data["dispatcher"].py_func.__module__)
    def on_end(self, e): pass
event.register("numba:compile", Listener())
"""


def test_another_checkout_finds_what_the_first_has_compiled(tmp_path):
    """But for the kernels of a file that is another there."""

    def modules_compiled(root):
        return printed(LISTED + SUMS, PYTHONPATH=str(root), NUMBA_CACHE_DIR=str(tmp_path / "kept"))

    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pyggml", tmp_path / "pyggml", ignore=without)
    (*compiled, result), (*again, same) = (
        modules_compiled(ROOT).split(),
        modules_compiled(tmp_path).split(),
    )
    assert "pyggml.jit.regions" in compiled and not again and result == same
    with (tmp_path / "pyggml/ops/loss/head_slices.py").open("a") as file:
        file.write("# changed")
    *changed, _ = modules_compiled(tmp_path).split()
    assert {*changed} == {"pyggml.ops.loss.head_slices"} < {*compiled}


NAME = """
import pyggml.jit
from numba.core import config
from numba.core.caching import IndexDataCacheFile
print(IndexDataCacheFile("folder", "kernel", "stamp")._data_name(1))
"""


def test_no_two_processes_write_machine_code_to_the_same_file(run):
    """Else one that compiles a kernel for other arguments meanwhile could call this one's code."""
    (first, _), (second, _) = run(NAME), run(NAME)
    assert first.endswith(".nbc") and second.endswith(".nbc") and first != second
