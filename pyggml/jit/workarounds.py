"""What Numba's cache lacks: the same bits in every process, kernels that are known by their source
wherever it lies, a file of its own for each process, files that are known to be whole and this
user's before they are read, and threads of its own for this package's loops.

Each changes private methods of Numba, and does nothing where another version lacks them.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from llvmlite.binding import Linkage
from numba.core import config
from numba.core.caching import CacheImpl, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary

from pyggml.jit.cache import stranger

_SUM_BYTES = hashlib.sha256().digest_size
PARALLEL_FOR = "pyggml_parallel_for"  # what shares out a loop, see pyggml.jit.pool
_PARALLEL_FOR_TAKES = ["ptr"] * 5 + ["i64"] * 3
_WEAK = (Linkage.linkonce_odr, Linkage.weak_odr)


def hold_settings(*names: str) -> None:
    """Let Numba keep these settings as they are now.

    It reads all of them anew from the environment, when it compiles, if a variable NUMBA_… has
    changed since: what was set by a program would be lost, kernels kept beside their sources, and
    kernels of other settings kept in a folder that is named after the first.
    """
    reloader: Any = getattr(config, "_env_reloader", None)
    read = getattr(reloader, "process_environ", None)
    if read is None:
        return
    held = {name: getattr(config, name) for name in names if hasattr(config, name)}

    def read_others(environ: dict[str, str]) -> None:
        read(environ)
        for name, value in held.items():
            setattr(config, name, value)

    reloader.process_environ = read_others


def call_own_copies() -> None:
    """Let the process that compiles a kernel run the very code that its cache will hold.

    A kernel's machine code carries copies of all that it calls, the bodies of its loops included,
    optimised once more; with sums that may be reordered they can differ in the last bit from those
    compiled before. The copies are weak symbols: the compiling process runs whichever code has the
    name already, later processes the copies. As internal symbols they are what every process runs.
    A loop's wrapper is weak where it is made and needed by that name.

    The copies of loops also call `parallel_for` of pyggml.jit.pool in place of Numba's.
    """
    optimize = getattr(JITCodeLibrary, "_optimize_final_module", None)
    if optimize is None:  # another Numba: all works, but for the last bit
        return

    def optimize_own(library: Any) -> None:
        makes_wrapper = "_GufuncWrapper" in library.name
        functions = () if makes_wrapper else tuple(library._final_module.functions)
        for f in functions:
            name = f.name
            ours = "pyggml" in name or "__numba_parfor_gufunc" in name
            if ours and f.linkage in _WEAK and not f.is_declaration:
                f.linkage = Linkage.internal
        if any("pyggml" in f.name for f in functions):
            _call_own_threads(functions)
        optimize(library)

    JITCodeLibrary._optimize_final_module = optimize_own


def _call_own_threads(functions: Iterable[Any]) -> None:
    for f in functions:
        if f.name == "numba_parallel_for":
            takes = [str(a.type) for a in f.arguments]
            f.name = PARALLEL_FOR if takes == _PARALLEL_FOR_TAKES else f.name


def without_overlaps(dispatcher: Any) -> Any:
    """A function that is compiled as Numba compiles the bodies of its own parallel loops: with
    arrays that do not overlap. Else LLVM compares addresses, and computes results that lie on a
    source one by one."""
    compiler: Any = getattr(dispatcher, "_compiler", None)
    customize = getattr(compiler, "_customize_flags", None)
    if customize is None:  # another Numba, or none
        return dispatcher

    def add_noalias(flags: Any) -> Any:
        flags = customize(flags)
        flags.noalias = True
        return flags

    compiler._customize_flags = add_noalias
    return dispatcher


def know_kernels_by_content() -> None:
    """Keep kernels of this package by what their files hold, not by where these lie.

    So a second checkout or environment finds what the first has compiled. What a kernel takes from
    other files names the whole folder (pyggml.jit.cache).
    """
    locators = getattr(CacheImpl, "_locator_classes", None)
    if locators is None:
        return
    plain: Any = locators[0]  # that of config.CACHE_DIR

    class Content(plain):  # type: ignore[misc]  # chosen as this runs
        def __init__(self, function: Any, file: str) -> None:
            super().__init__(function, file)
            self._stamp = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            folder = f"{function.__module__}-{self._stamp[:12]}"
            self._cache_path = str(Path(config.CACHE_DIR, folder))

        def get_source_stamp(self) -> str:
            return self._stamp

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            is_ours = function.__module__.partition(".")[0] == "pyggml"
            return super().from_function(function, file) if is_ours else None

    CacheImpl._locator_classes = [Content, *locators]


def name_files_apart() -> None:
    """Number a process's files of machine code from its own id on.

    Numba gives each the next free number of its kernel's index. Two processes that compile a kernel
    for different arguments at once would take the same, and one's code would be called as the
    other's; so the worst is that an index forgets an entry, which is then compiled anew.
    """
    name = getattr(IndexDataCacheFile, "_data_name", None)
    if name is not None:
        first = os.getpid() << 16
        IndexDataCacheFile._data_name = lambda file, number: name(file, first + number)


def check_files(folder: Path) -> None:
    """End each file of this cache with its sum, and take one that lacks it for missing.

    Numba unpickles what it finds: a file cut off or changed by a full disk or a power cut would end
    the program, and one that somebody else wrote would run as this user. What is missing is
    compiled anew. Pickle reads no further than its own end, so a sum behind it is in nobody's way.
    """
    names = ("_open_for_write", "_load_index", "_load_data")
    if not all(hasattr(IndexDataCacheFile, name) for name in (*names, "_data_path")):
        return
    open_plain, load_index, load_data = (getattr(IndexDataCacheFile, name) for name in names)

    def is_ours(file: Any) -> bool:  # other packages have caches of their own
        return Path(file._cache_path).is_relative_to(folder)

    @contextmanager
    def open_summed(file: Any, path: str) -> Iterator[IO[bytes]]:
        with open_plain(file, path) as written:
            if not is_ours(file):
                yield written
                return
            whole = io.BytesIO()
            yield whole
            if hasattr(os, "fchmod"):
                os.fchmod(written.fileno(), 0o600)
            written.write(whole.getvalue() + _sum(path, whole.getvalue()))

    def load_whole_index(file: Any) -> dict[Any, str]:
        is_good = not is_ours(file) or _is_whole(file._index_path)
        return load_index(file) if is_good else {}

    def load_whole_data(file: Any, name: str) -> Any:
        path = file._data_path(name)
        if is_ours(file) and not _is_whole(path):
            raise FileNotFoundError(path)
        return load_data(file, name)

    IndexDataCacheFile._open_for_write = open_summed
    IndexDataCacheFile._load_index = load_whole_index
    IndexDataCacheFile._load_data = load_whole_data


def _is_whole(path: str) -> bool:
    """Whether a file is this user's and ends with its sum. Warns if it is somebody else's."""
    try:
        with Path(path).open("rb") as file:
            wrong = stranger(os.fstat(file.fileno()))
            if wrong:
                warnings.warn(
                    f"{path}: {wrong}, so this kernel is compiled anew",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return False
            content = file.read()
    except OSError:
        return False
    return _sum(path, content[:-_SUM_BYTES]) == content[-_SUM_BYTES:]


def _sum(path: str, content: bytes) -> bytes:
    """SHA-256 of a file's name and content: one file in place of another is not whole."""
    return hashlib.sha256(Path(path).name.encode() + b"\0" + content).digest()
