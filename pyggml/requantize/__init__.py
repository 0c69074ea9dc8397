"""Models as files of other weight types, and the importance of their columns."""

from pyggml.requantize.requantize import Progress, requantize, rewrite

__all__ = ["Progress", "requantize", "rewrite"]
