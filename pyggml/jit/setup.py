"""What happens once, when the first kernel is about to be declared.

OpenMP's waiting and the choice of the thread layer, the width of vectors, the cache folder, and the
workarounds for Numba's cache. Numba reads its settings when a kernel is declared, and OpenMP its
own when it first runs: importing this file does it all, and pyggml.jit imports it first.
"""

import os
from pathlib import Path

from numba.core import config
from numba.core.codegen import get_host_cpu_features

from pyggml.jit.cache import writable_folder
from pyggml.jit.permission import tiles_granted
from pyggml.jit.workarounds import call_own_copies, check_files, name_files_apart


def _let_threads_sleep() -> None:
    """Tell OpenMP how long an idle thread waits before it sleeps.

    Idle OpenMP threads sleep after some 40 µs. If they spin on, each small loop waits for a whole
    time slice (5 ms against 7 µs, measured) whenever another process wants the core; at 0.1 ms two
    trainings side by side took 4.5 s a step where one takes 1.6 s (3.3 s now). If they sleep at
    once, waking them costs each loop 40 µs.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _prefer_openmp() -> None:
    """OpenMP starts a loop in 2 to 14 µs, the built-in work queue in 180 µs (measured)."""
    if "NUMBA_THREADING_LAYER" not in os.environ:
        config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


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


_let_threads_sleep()
_prefer_openmp()
_use_whole_vectors()
call_own_copies()
name_files_apart()
CACHE = _keep_kernels()  # where compiled kernels are kept, None if they cannot be
