"""What Numba's cache lacks: the same bits in every process, and a file of its own for each process.

Both change a private method of Numba, and do nothing where another version lacks it.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite.binding import Linkage
from numba.core.caching import IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary

_WEAK = (Linkage.linkonce_odr, Linkage.weak_odr)


def call_own_copies() -> None:
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
