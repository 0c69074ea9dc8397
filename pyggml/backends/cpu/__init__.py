"""The CPU, through Numba: its memory, and its order of a graph; ops declare its kernels."""

from pyggml.backends.cpu.device import CPU, array, copy_rows, detach, is_constant, read, write

__all__ = ["CPU", "array", "copy_rows", "detach", "is_constant", "read", "write"]
