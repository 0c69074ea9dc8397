"""Numba as this project uses it: decorators, and compiled code that is called by its address.

kernel      a serial machine-code function
exact       the same without reordered or fused arithmetic
parallel    the same with `prange` over rows, whose shares the threads of pool.py take
block_code  void(float32*, uint8*, n_blocks): code called through its address, so that one matrix
            product serves every weight type (see pyggml.kernels.gemm)

setup.py does all that is done once, before the first kernel is declared; the other files only
define: cache.py the folder of compiled kernels, workarounds.py what Numba's cache lacks, parts.py
what is not made of functions that kernels call, compiler.py what else compiles sooner,
decorators.py and code.py the above, pool.py the threads; `pyggml.threads` says how many of them
kernels use.
"""

from numba import carray, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from pyggml.jit import pool
from pyggml.jit.code import BlockCode, Code, block_code
from pyggml.jit.decorators import ALONE, compile_for, exact, kernel, parallel
from pyggml.jit.isa import JIT
from pyggml.jit.llvm import instruction
from pyggml.jit.setup import CACHE

__all__ = [
    "ALONE", "CACHE", "JIT", "BlockCode", "Code", "block_code", "carray", "cgutils", "compile_for",
    "exact", "instruction", "intrinsic", "kernel", "parallel", "pool", "prange", "types",
]  # fmt: skip
