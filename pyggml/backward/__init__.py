"""Loss and parameters in, gradient tensors out, in the same graph. No op's formula is here."""

from pyggml.backward.walk import build_backward

__all__ = ["build_backward"]
