"""NVIDIA cards, through Numba's CUDA: their memory, and kernels by the names of ops.

Nothing of it is imported with the package; `open_cuda` imports it, or says what is missing.
"""

from pyggml.backends.cuda.runtime.opening import Card, cards, open_cuda

__all__ = ["Card", "cards", "open_cuda"]
