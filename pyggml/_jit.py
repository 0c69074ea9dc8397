"""The only module that talks to Numba: the decorators, the cache folder, the threads.

kernel      a serial machine-code function
exact       the same without reordered or fused arithmetic
parallel    the same with `prange` over rows; costs 2 to 14 µs a call, so for large work only
block_code  void(float32*, uint8*, n_blocks): code called through its address, so that one matrix
            product serves every weight type (see pyggml.gemm)

Numba's own cache notices edits in a kernel's file, but not in files whose helpers it inlines, nor a
change of the bounds-check flag. The cache folder is therefore named after those; a kernel may take
compiled helpers from its own file and from SHARED only.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import llvmlite
import numba
from llvmlite.binding import Linkage
from numba import carray, get_thread_id, prange, types
from numba.core import cgutils, config
from numba.core.caching import IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.extending import intrinsic

__all__ = [
    "ALONE",
    "CACHE",
    "JIT",
    "block_code",
    "carray",
    "cgutils",
    "compile_for",
    "exact",
    "get_thread_id",
    "intrinsic",
    "kernel",
    "max_threads",
    "parallel",
    "prange",
    "set_threads",
    "task_code",
    "threads",
    "types",
]

JIT: bool = not config.DISABLE_JIT
ALONE = 4096  # floats that one thread is done with before others are awake
SHARED = (
    "_isa.py",
    "_jit.py",
    "_llvm.py",
    "_simd.py",
    "_tasks.py",
    "dtypes.py",
    "quants/bits.py",
    "quants/iq4.py",
    "gemm/blocks.py",
    "gemm/activations.py",
    "gemm/dots.py",
    "gemm/int8_tile.py",
    "gemm/frames.py",
    "gemm/microkernel.py",
    "gemm/panels.py",
    "attention/tiles.py",
    "attention/decode_tile.py",
    "ops/recurrence.py",
    "ops/strips.py",
)

_CACHE_BYTES = 64 << 20  # some more than all kernels take
# The reductions may be reordered into vector lanes; NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}


def _cache_root() -> Path:
    """Where the operating system keeps caches of this user."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _cache_dir() -> Path:
    digest = hashlib.sha256()
    stamp = (
        (numba.__version__, llvmlite.__version__, sys.version),
        config.BOUNDSCHECK,
        os.environ.get("PYGGML_ISA"),
    )
    digest.update(repr(stamp).encode())
    for name in SHARED:
        source = Path(__file__).parent / name
        if source.exists():
            digest.update(source.read_bytes())
    return _cache_root() / "pyggml" / digest.hexdigest()[:12]


def _writable_cache() -> Path | None:
    """The cache folder; where it cannot be written, with a warning, one for this process alone:
    in one that others can write they could put their machine code. None if that fails too.
    """
    try:
        given = os.environ.get("NUMBA_CACHE_DIR")
        folder = Path(given) if given else _cache_dir()
        _check_room(folder)
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        warnings.warn(
            f"the cache of compiled kernels cannot be written ({error}), so every run compiles "
            "them anew; NUMBA_CACHE_DIR can name another folder",
            RuntimeWarning,
            stacklevel=2,
        )
    try:
        own = Path(tempfile.mkdtemp(prefix="pyggml-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        _check_room(own)
        return own
    except OSError:
        return None


def _check_room(folder: Path) -> None:
    """OSError unless a file can be made there, and the disk has room for all kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    if shutil.disk_usage(folder).free < _CACHE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


# Idle OpenMP threads sleep after some 40 µs. If they spin on, each small loop waits for a whole
# time slice (5 ms against 7 µs, measured) whenever another process wants the core; at 0.1 ms two
# trainings side by side took 4.5 s a step where one takes 1.6 s (3.3 s now). If they sleep at once,
# waking them costs each loop 40 µs. Read when OpenMP is first used.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("KMP_BLOCKTIME", "0")

CACHE = _writable_cache()  # where compiled kernels are kept, None if they cannot be
if CACHE is not None:
    config.CACHE_DIR = str(CACHE)
if "NUMBA_THREADING_LAYER" not in os.environ:
    # OpenMP starts a loop in 2 to 14 µs, the built-in work queue in 180 µs (measured).
    config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def _call_own_copies() -> None:
    """Let the process that compiles a kernel run the very code that its cache will hold.

    A kernel's machine code carries copies of all that it calls, the bodies of its loops included,
    optimised once more; with sums that may be reordered they can differ in the last bit from those
    compiled before. The copies are weak symbols: the compiling process runs whichever code has the
    name already, later processes the copies. As internal symbols they are what every process runs.
    A loop's wrapper is weak where it is made and needed by that name.
    """
    optimize = getattr(JITCodeLibrary, "_optimize_final_module", None)
    if optimize is None:  # another Numba: all works, but for the last bit
        return

    def optimize_own(library: Any) -> None:
        makes_wrapper = "_GufuncWrapper" in library.name
        for f in () if makes_wrapper else library._final_module.functions:
            ours = any(part in f.name for part in ("pyggml", "__numba_parfor_gufunc"))
            if ours and f.linkage in _WEAK and not f.is_declaration:
                f.linkage = Linkage.internal
        optimize(library)

    JITCodeLibrary._optimize_final_module = optimize_own


_WEAK = (Linkage.linkonce_odr, Linkage.weak_odr)
_call_own_copies()


def _name_files_apart() -> None:
    """Number a process's files of machine code from its own id on.

    Numba gives each the next free number of its kernel's index. Two processes that compile a kernel
    for different arguments at once would take the same, and one's code would be called as the
    other's; so the worst is that an index forgets an entry, which is then compiled anew.
    """
    name = getattr(IndexDataCacheFile, "_data_name", None)
    if name is not None:
        first = os.getpid() << 16
        IndexDataCacheFile._data_name = lambda file, number: name(file, first + number)


_name_files_apart()

_OPTIONS: dict[str, Any] = {
    "cache": CACHE is not None,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": _FASTMATH,
}
kernel: Callable[[Callable], Callable] = numba.njit(**_OPTIONS)
parallel: Callable[[Callable], Callable] = numba.njit(parallel=True, **_OPTIONS)
# Without fast arithmetic: packing must round as ggml's C does, or its bytes differ.
exact: Callable[[Callable], Callable] = numba.njit(
    **{name: value for name, value in _OPTIONS.items() if name != "fastmath"}
)

_BLOCK_SIGNATURE = types.void(
    types.CPointer(types.float32), types.CPointer(types.uint8), types.intp
)
_TASK_SIGNATURE = types.void(types.CPointer(types.int64), types.intp, types.intp)


def compile_for(function: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a kernel for these arguments, unless that is done; plain Python is left as it is."""
    compile_types = getattr(function, "compile", None)
    if compile_types is not None:
        compile_types(tuple(function.typeof_pyval(a) for a in arguments))


class Code:
    """A function over raw pointers, compiled when its address is first asked for.

    `ready` is called before it is compiled or interpreted: it fills tables that the code reads.
    """

    def __init__(self, code: Callable, signature: Any, ready: Callable[[], None] | None) -> None:
        self.code, self._signature, self._ready = code, signature, ready

    @cached_property
    def _interpreted(self) -> Callable:
        if self._ready is not None:
            self._ready()
        return self.code

    @cached_property
    def _compiled(self) -> Any:
        options = {name: value for name, value in _OPTIONS.items() if name != "nogil"}
        bounds = bool(config.BOUNDSCHECK)
        return numba.cfunc(self._signature, boundscheck=bounds, **options)(self._interpreted)

    @property
    def address(self) -> int:
        """The machine address of the compiled code."""
        return int(self._compiled.address)


class BlockCode(Code):
    """`code(dst, src, n_blocks)`: unpacks blocks of one weight type."""

    def __call__(self, dst: Any, src: Any, n_blocks: int) -> None:
        """Run it on C-contiguous arrays: dst float32, src uint8 (interpreted if the JIT is off)."""
        d = dst.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        s = src.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if JIT:
            self._compiled.ctypes(d, s, n_blocks)
        else:
            self._interpreted(d, s, n_blocks)


@overload
def block_code(code: Callable) -> BlockCode: ...
@overload
def block_code(*, ready: Callable[[], None]) -> Callable[[Callable], BlockCode]: ...
def block_code(
    code: Callable | None = None, *, ready: Callable[[], None] | None = None
) -> BlockCode | Callable[[Callable], BlockCode]:
    """Declare a block unpacker; `carray` turns its pointers into arrays. `ready`: see Code."""
    if code is None:
        return lambda code: BlockCode(code, _BLOCK_SIGNATURE, ready)
    return BlockCode(code, _BLOCK_SIGNATURE, None)


def task_code(code: Callable) -> Code:
    """Declare `code(frame, task, thread)`: one task of a large kernel, see pyggml._tasks."""
    return Code(code, _TASK_SIGNATURE, None)


def threads() -> int:
    """How many threads parallel kernels use."""
    return int(numba.get_num_threads())


def max_threads() -> int:
    """The most threads this process can use; per-thread scratch is planned for this many."""
    return int(config.NUMBA_NUM_THREADS)


def set_threads(n: int) -> None:
    """Use n threads from now on; n is clipped to what the process was started with."""
    numba.set_num_threads(max(1, min(n, config.NUMBA_NUM_THREADS)))


def check_threading_layer() -> None:
    """Warn once, after the first parallel kernel ran, if only the slow thread layer was found."""
    if JIT and numba.threading_layer() == "workqueue":
        warnings.warn(
            "Numba found neither OpenMP nor TBB, so small parallel kernels will be slow: "
            "install libomp (macOS) or the package tbb",
            RuntimeWarning,
            stacklevel=2,
        )
