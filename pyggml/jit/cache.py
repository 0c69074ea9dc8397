"""The folder of compiled kernels, and the fingerprint that names it.

Numba's own cache notices edits in a kernel's file, but not in files whose helpers it inlines, nor a
change of its settings or of the instruction set that is chosen. The folder is therefore named after
those, also in a folder that NUMBA_CACHE_DIR names: kernels of other sources would write past the
ends of today's arrays. A kernel may take compiled helpers and constants from its own file and from
SHARED only.

Numba's files are pickles, and run as whoever reads them. So the folder and its files must be this
user's and writable by nobody else, wherever they lie.
"""

import atexit
import errno
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from pathlib import Path

import llvmlite
import numba
from numba.core import config

from pyggml.files import user_cache
from pyggml.jit.isa import CHOSEN

# Files whose helpers and constants kernels of other files are made of, whole folders or one by one.
# A test compares them with what kernels take.
_PATTERNS = """
jit/*.py formulas/*.py graph/dtypes.py sizes.py quants/*.py quants/*/*.py kernels/formulas.py
kernels/gemm/activations.py kernels/gemm/beside.py kernels/gemm/bfloat16.py kernels/gemm/dots.py
kernels/gemm/few*.py kernels/gemm/frames.py kernels/gemm/int*.py kernels/gemm/product.py
kernels/gemm/lane_dots.py kernels/gemm/microkernel.py kernels/gemm/panels.py
kernels/gemm/row_plan.py kernels/gemm/teams.py kernels/gemm/tile.py kernels/gemm/amx/tiles.py
kernels/gemm/amx/rows.py kernels/attention/amx*.py
kernels/attention/*softmax.py kernels/attention/flash*.py kernels/attention/tile*.py
kernels/attention/decode_tile.py kernels/attention/extras.py
ops/formulas.py ops/recurrent/recurrence.py
"""
_ROOT = Path(__file__).parents[1]
SHARED = tuple(
    p.relative_to(_ROOT).as_posix()
    for pattern in _PATTERNS.split()
    for p in sorted(_ROOT.glob(pattern))
)

# Settings of Numba's, NUMBA_… in the environment, that its compiler makes other machine code from.
CODE_SETTINGS = (
    "BOUNDSCHECK",
    "OPT",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "DISABLE_INTEL_SVML",
    "ENABLE_AVX",
    "DEBUGINFO_DEFAULT",
    "LLVM_REFPRUNE_PASS",
    "LLVM_REFPRUNE_FLAGS",
)

_CACHE_BYTES = 64 << 20  # some more than all kernels take


def _name() -> str:
    """The name of the folder for kernels of this Numba, this instruction set and these sources."""
    stamp = (
        (numba.__version__, llvmlite.__version__, sys.version),
        tuple(getattr(config, name, None) for name in CODE_SETTINGS),
        CHOSEN.name,
    )
    digest = hashlib.sha256(repr(stamp).encode())
    for name in SHARED:
        digest.update((_ROOT / name).read_bytes())
    return digest.hexdigest()[:12]


class _UntrustedError(Exception):
    """A folder that somebody else could put machine code into."""


def writable_folder() -> Path | None:
    """The cache folder, in the user's or that of NUMBA_CACHE_DIR. Where it cannot be written, or
    others can write there too, with a warning, one for this process alone. None if that fails too.
    """
    try:
        given = os.environ.get("NUMBA_CACHE_DIR")
        folder = (Path(given) if given else user_cache()) / _name()
        _check_room(folder)
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = f"cannot be written ({error})"
    except _UntrustedError as error:
        reason = f"is refused ({error})"
    warnings.warn(
        f"the cache of compiled kernels {reason}, so every run compiles them anew; "
        "NUMBA_CACHE_DIR can name another folder",
        RuntimeWarning,
        stacklevel=2,
    )
    try:
        own = Path(tempfile.mkdtemp(prefix="pyggml-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        _check_room(own / _name())
        return own / _name()
    except (OSError, _UntrustedError):
        return None


def _check_room(folder: Path) -> None:
    """OSError unless a file can be made there, and the disk has room for all kernels.

    _UntrustedError if somebody else could put a file there, or another folder in its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_owners(folder.absolute())
    with tempfile.TemporaryFile(dir=folder):
        pass
    if shutil.disk_usage(folder).free < _CACHE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _check_owners(folder: Path) -> None:
    """_UntrustedError unless the folder is this user's alone, and nobody can replace it.

    A folder above may be root's, a group's, or everybody's if it is sticky, as /tmp is.
    """
    wrong = stranger(folder.lstat())
    if wrong:
        raise _UntrustedError(f"{folder}: {wrong}")
    if os.name != "posix":
        return
    for above in folder.parents:
        status = above.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise _UntrustedError(f"{above}: others may write there")
    if folder.parent.stat().st_uid not in (0, os.geteuid()):
        raise _UntrustedError(f"{folder.parent}: belongs to another user")


def stranger(status: os.stat_result) -> str:
    """Who else could have written a file or folder of this status; "" if nobody.

    Windows keeps no such bits: there a user's folders are his.
    """
    if os.name != "posix":
        return ""
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    return "others may write there" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
