"""Backends: devices that run graphs. Each has memory, and kernels by op.

The CPU (`pyggml.backends.cpu`) comes with the package; leaves lie in its memory.
"""

from pyggml.backends.base import Backend, Links

__all__ = ["Backend", "Links"]
