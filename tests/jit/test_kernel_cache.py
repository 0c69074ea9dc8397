"""Where compiled kernels are kept, and what happens where that is not possible: a note, no more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Compiles one kernel, uses it, and prints where Numba looks for caches.
SCRIPT = """
import numpy as np
from numba.core import config
from pyggml.quants import quantize
quantize(np.ones((1, 32), np.float32), "Q8_0")
print(config.CACHE_DIR)
"""
ANYWHERE = ("generic", "numpy")  # instruction sets of any CPU
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
    again, _ = run(SCRIPT, XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "own"))
    assert again == str(tmp_path / "own" / Path(folder).name)
    assert list((tmp_path / "own").rglob("*.nbi"))


def test_kernels_of_another_instruction_set_have_a_folder_of_their_own(run, tmp_path):
    """Also where the user names one: made for other vectors, they would write past arrays."""
    folders = {run(SCRIPT, PYGGML_ISA=isa, NUMBA_CACHE_DIR=str(tmp_path))[0] for isa in ANYWHERE}
    assert len(folders) == len(ANYWHERE)


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_a_folder_that_cannot_be_made(run, tmp_path, variable):
    (tmp_path / "file").write_text("")
    folder, warned = run(SCRIPT, **{variable: str(tmp_path / "file")})
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


SUMS = """
import hashlib
import numpy as np
from pyggml.ops.loss.head import _softmax_loss_rows
rng = np.random.default_rng(0)
z, weights = rng.standard_normal((7, 1003), np.float32), rng.random(7, np.float32)
targets, losses = rng.integers(0, 1003, 7).astype(np.int32), np.zeros(7, np.float32)
right = np.zeros(7, np.bool_)
z *= 3
_softmax_loss_rows(z, losses, right, targets, weights, True, np.float32(0))
print(hashlib.sha256(z.tobytes() + losses.tobytes()).hexdigest())
"""


def test_the_process_that_compiles_a_kernel_gives_the_bits_of_later_ones(tmp_path):
    """A parallel loop with a sum: what ran and what was kept have added in another order."""
    found = [
        subprocess.run(
            [sys.executable, "-P", "-c", SUMS],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert list(tmp_path.rglob("*.nbc")), "the first process kept its kernel"
    assert found[0] == found[1]


NAME = """
import pyggml.jit
from numba.core.caching import IndexDataCacheFile
print(IndexDataCacheFile("folder", "kernel", "stamp")._data_name(1))
"""


def test_no_two_processes_write_machine_code_to_the_same_file(run):
    """Else one that compiles a kernel for other arguments meanwhile could call this one's code."""
    (first, _), (second, _) = run(NAME), run(NAME)
    assert first.endswith(".nbc") and second.endswith(".nbc") and first != second
