"""What happens once, when the first kernel is about to be declared.

The width of vectors, the cache folder, and what Numba's compiler and cache do otherwise here.
Numba reads its settings when a kernel is declared: importing this file does it all, and pyggml.jit
imports it first.
"""

from pathlib import Path

from numba.core import config
from numba.core.codegen import get_host_cpu_features

from pyggml.jit.cache import CODE_SETTINGS, writable_folder
from pyggml.jit.compiler import (
    compare_flags_by_what_is_set,
    compile_without_collecting,
    list_variables_by_type,
)
from pyggml.jit.parts import compile_parts, emit_when_called
from pyggml.jit.permission import tiles_granted
from pyggml.jit.workarounds import (
    call_own_copies,
    check_files,
    hold_settings,
    know_kernels_by_content,
    name_files_apart,
)


def _use_whole_vectors() -> None:
    """On CPUs with tiles, have LLVM make loops of whole vector registers.

    It prefers half of one on Intel's CPUs with AVX-512, the first of which clocked down for whole
    ones.
    """
    if tiles_granted() and config.CPU_NAME is None and config.CPU_FEATURES is None:
        config.CPU_FEATURES = get_host_cpu_features() + ",-prefer-256-bit"


def _keep_kernels() -> Path | None:
    """Choose the cache folder and hand it to Numba; None if compiled kernels cannot be kept."""
    folder = writable_folder()
    if folder is not None:
        config.CACHE_DIR = str(folder)
        check_files(folder)
    return folder


_use_whole_vectors()
call_own_copies()
name_files_apart()
know_kernels_by_content()
emit_when_called()
compile_parts()
compile_without_collecting()
compare_flags_by_what_is_set()
list_variables_by_type()
CACHE = _keep_kernels()  # where compiled kernels are kept, None if they cannot be
hold_settings("CACHE_DIR", "CPU_FEATURES", *CODE_SETTINGS)
