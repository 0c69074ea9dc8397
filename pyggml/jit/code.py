"""Functions over raw pointers, called by their address in machine code."""

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numba
from numba import types
from numba.core import config

from pyggml.jit.decorators import OPTIONS
from pyggml.jit.isa import JIT

_BLOCK_SIGNATURE = types.void(
    types.CPointer(types.float32), types.CPointer(types.uint8), types.intp
)


class Code:
    """A function over raw pointers, compiled when its address is first asked for; exact: sums stay
    in the order in which they are written."""

    def __init__(self, code: Callable, signature: Any, exact: bool = False) -> None:
        self.code, self._signature, self._exact = code, signature, exact

    @cached_property
    def _function(self) -> Any:
        options = {name: value for name, value in OPTIONS.items() if name != "nogil"}
        if self._exact:
            options["fastmath"] = False
        bounds = bool(config.BOUNDSCHECK)
        return numba.cfunc(self._signature, boundscheck=bounds, **options)(self.code)

    @property
    def address(self) -> int:
        """The machine address of the compiled code."""
        return int(self._function.address)


class BlockCode(Code):
    """`code(dst, src, n_blocks)`: unpacks blocks of one weight type."""

    def __call__(self, dst: Any, src: Any, n_blocks: int) -> None:
        """Run it on C-contiguous arrays: dst float32, src uint8 (interpreted if the JIT is off)."""
        d = dst.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        s = src.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if JIT:
            self._function.ctypes(d, s, n_blocks)
        else:
            self.code(d, s, n_blocks)


def block_code(code: Callable) -> BlockCode:
    """Declare a block unpacker; `carray` turns its pointers into arrays."""
    return BlockCode(code, _BLOCK_SIGNATURE)
