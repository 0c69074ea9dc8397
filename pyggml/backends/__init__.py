"""What runs a graph: memory, kernels by op, and what is not supported. The CPU is the first."""

from pyggml.backends.base import Backend
from pyggml.backends.cpu import CPU

__all__ = ["CPU", "Backend"]
