"""The decorators that turn functions into kernels; see pyggml.jit for which is which."""

from collections.abc import Callable
from typing import Any

import numba

from pyggml.jit.setup import CACHE
from pyggml.jit.workarounds import without_overlaps

ALONE = 4096  # floats that one thread is done with before others are awake

# The reductions may be reordered into vector lanes; NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}
OPTIONS: dict[str, Any] = {
    "cache": CACHE is not None,
    "nogil": True,
    "no_cfunc_wrapper": True,  # for C, which calls none; `Code` has its own
    "error_model": "numpy",
    "fastmath": _FASTMATH,
}
kernel: Callable[[Callable], Callable] = numba.njit(**OPTIONS)
# Without fast arithmetic: packing must round as ggml's C does, or its bytes differ. A function
# without the option would have the arithmetic of the first kernel that calls it.
exact: Callable[[Callable], Callable] = numba.njit(**OPTIONS | {"fastmath": False})


def apart(function: Callable, fuses: bool = False) -> Callable:
    """A loop to be compiled into tasks, as `exact`; or one that may fuse products and sums. LLVM
    may take it that no array lies on another: when element i of the results is written, no source's
    is read any more."""
    plain = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "cache": False}
    fastmath = {"fastmath": {"contract"} if fuses else False}
    return without_overlaps(numba.njit(**OPTIONS | fastmath | plain)(function))


def parallel(function: Callable) -> Callable:
    """A kernel whose loops with `prange` are shared out. They are known as ours by this package's
    name in that of the kernel, wherever it is declared (call_own_copies in jit/workarounds.py)."""
    if "pyggml" not in function.__module__:
        function.__qualname__ = f"pyggml.{function.__qualname__}"
    compiled: Callable = numba.njit(parallel=True, **OPTIONS)(function)
    return compiled


def compile_for(function: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a kernel for these arguments, unless that is done; plain Python is left as it is."""
    compile_types = getattr(function, "compile", None)
    if compile_types is not None:
        compile_types(tuple(function.typeof_pyval(a) for a in arguments))
