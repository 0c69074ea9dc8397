"""The CPU, through Numba: its memory, and its order of a graph; ops declare its kernels."""

from pyggml.backends.cpu.device import (
    CPU,
    Held,
    array,
    copy_rows,
    detach,
    expect_held,
    has_memory,
    held,
    is_constant,
    read,
    write,
)

__all__ = [
    "CPU",
    "Held",
    "array",
    "copy_rows",
    "detach",
    "expect_held",
    "has_memory",
    "held",
    "is_constant",
    "read",
    "write",
]
