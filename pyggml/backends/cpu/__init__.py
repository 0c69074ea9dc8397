"""The CPU, through Numba: its memory, and the kernels that ops declare for it."""

from pyggml.backends.cpu.device import CPU, array, copy_rows, detach, is_constant, read, write
from pyggml.backends.cpu.kernel import (
    KERNELS,
    REWRITES,
    Compute,
    Kernel,
    Site,
    as_four,
    as_rows,
    cpu_kernel,
    cpu_rewrite,
    flat,
    four,
    rows,
)

__all__ = [
    "CPU",
    "KERNELS",
    "REWRITES",
    "Compute",
    "Kernel",
    "Site",
    "array",
    "as_four",
    "as_rows",
    "copy_rows",
    "cpu_kernel",
    "cpu_rewrite",
    "detach",
    "flat",
    "four",
    "is_constant",
    "read",
    "rows",
    "write",
]
