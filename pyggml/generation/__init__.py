"""Text generation: a prompt fills the cache, then tokens are sampled one at a time.

session      a model and its cache: tokens in, logits out
sampling     how tokens are sampled: the settings
sampler      logits → a token
stops        stop strings
completion   logits in, pieces of text out, until something ends the answer
"""

from pyggml.generation.completion import Completion, Finish, Piece, complete, generate
from pyggml.generation.sampler import Sampler, sample
from pyggml.generation.sampling import Sampling
from pyggml.generation.session import Session

__all__ = [
    "Completion",
    "Finish",
    "Piece",
    "Sampler",
    "Sampling",
    "Session",
    "complete",
    "generate",
    "sample",
]
