"""The CPU, through Numba: its memory, and its order of a graph; ops declare its kernels."""

from pyggml.backends.cpu.device import CPU

__all__ = ["CPU"]
