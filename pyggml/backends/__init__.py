"""Backends: devices that run graphs. Each has memory, and kernels by op.

The CPU comes with the package; leaves lie in its memory.
"""

from pyggml.backends.base import Backend
from pyggml.backends.choice import backends_of
from pyggml.backends.cpu import CPU, copy_rows, detach, is_constant, read, write

__all__ = ["CPU", "Backend", "backends_of", "copy_rows", "detach", "is_constant", "read", "write"]
