"""The CPU, through Numba: its memory, and its order of a graph; ops declare its kernels."""

from pyggml.backends.cpu.device import (
    CPU,
    LeafArrays,
    array,
    copy_rows,
    detach,
    expect_held,
    has_memory,
    is_constant,
    leaf_arrays,
    read,
    write,
)

__all__ = [
    "CPU",
    "LeafArrays",
    "array",
    "copy_rows",
    "detach",
    "expect_held",
    "has_memory",
    "is_constant",
    "leaf_arrays",
    "read",
    "write",
]
