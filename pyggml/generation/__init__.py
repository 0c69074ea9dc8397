"""Text generation: a prompt fills the cache, then tokens are sampled one at a time."""

from pyggml.generation.completion import generate
from pyggml.generation.sampling import Sampling, sample
from pyggml.generation.session import Session

__all__ = ["Sampling", "Session", "generate", "sample"]
