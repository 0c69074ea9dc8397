"""The CPU, through Numba: its memory, and the kernels that ops declare for it."""

from pyggml.backends.cpu.device import CPU, array, copy_rows, detach, is_constant, read, write
from pyggml.backends.cpu.kernel import (
    KERNELS,
    Compute,
    Kernel,
    Site,
    as_four,
    as_rows,
    cpu_kernel,
    flat,
    four,
    rows,
)

__all__ = [
    "CPU",
    "KERNELS",
    "Compute",
    "Kernel",
    "Site",
    "array",
    "as_four",
    "as_rows",
    "copy_rows",
    "cpu_kernel",
    "detach",
    "flat",
    "four",
    "is_constant",
    "read",
    "rows",
    "write",
]
