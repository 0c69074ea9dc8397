"""Fills an ARM machine's cache of kernels on x86-64, where LLVM is not slowed down by an emulator.

usage: pytest -p arm_cache …                     writes which kernels were called, with which types
       python arm_cache.py ask                   on the ARM machine: what its Numba compiles for
       python arm_cache.py fill ASKED KERNELS    compiles them for it; both are files

As a plugin it writes to the file that KERNELS names. `fill` takes the processor for that of the ARM
machine, imports the sources where that has them (PYTHONPATH), and compiles without calling; its
cache is NUMBA_CACHE_DIR. Kernels that are declared inside of functions, and those that only ARM's
products take, are not filled in: the ARM machine compiles them. Both machines need the same
NUMBA_BOUNDSCHECK.
"""

import importlib
import json
import os
import pickle
import platform
import sys
from pathlib import Path

import llvmlite.binding as llvm
from numba.core.dispatcher import Dispatcher

TRIPLE = "aarch64-unknown-linux-gnu"

# -- on any machine -------------------------------------------------------------------------------

_declared = []


def note_kernels():
    """Called before the first is declared, which is when a plugin is imported."""
    declare = Dispatcher.__init__

    def note(self, *arguments, **options):
        declare(self, *arguments, **options)
        _declared.append(self)

    Dispatcher.__init__ = note


if "KERNELS" in os.environ:
    assert "NUMBA_BOUNDSCHECK" in os.environ, "a plugin imports Numba before conftest.py sets it"
    note_kernels()


def pytest_sessionfinish(session):
    kernels = {}
    for one in _declared:
        place = one.py_func.__module__, one.py_func.__qualname__
        if "<locals>" not in place[1] and one.overloads:
            kernels.setdefault(place, set()).update(map(pickle.dumps, one.overloads))
    Path(os.environ["KERNELS"]).write_bytes(pickle.dumps(kernels))


# -- on the ARM machine ---------------------------------------------------------------------------


def ask():
    from numba.core.registry import cpu_target

    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    assert triple == TRIPLE, triple
    asked = cpu, features, sys.version, os.environ.get("PYGGML_ISA", "auto")
    sys.stdout.write(json.dumps(asked))


# -- on x86-64 ------------------------------------------------------------------------------------


def pretend(cpu, features, version, isa):
    """Have Numba and pyggml, which is not imported yet, take this machine for that one."""
    os.environ.update(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    if isa != "auto":
        os.environ["PYGGML_ISA"] = isa
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = llvm.get_default_triple = lambda: TRIPLE
    llvm.get_host_cpu_name, llvm.get_host_cpu_features = lambda: cpu, llvm.FeatureMap
    platform.machine = lambda: "aarch64"
    sys.version = version  # names the cache


def fill(asked, kernels):
    pretend(*json.loads(Path(asked).read_text()))
    n_filled = n_left = 0
    for (module, name), signatures in sorted(pickle.loads(Path(kernels).read_bytes()).items()):
        try:
            kernel = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            kernel = None
        if not isinstance(kernel, Dispatcher):
            n_left += len(signatures)
            continue
        for signature in signatures:
            kernel.compile(pickle.loads(signature))
            n_filled += 1
    sys.stdout.write(f"{n_filled} kernels compiled, {n_left} left to the ARM machine\n")


if __name__ == "__main__":
    {"ask": ask, "fill": fill}[sys.argv[1]](*sys.argv[2:])
