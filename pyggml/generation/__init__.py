"""Text generation: a prompt fills the cache, then tokens are sampled one at a time.

context      how a sequence's context is kept: the settings
memory       the cache of several sequences
passes       bound programs that take tokens through the model
batch        sequences in slots: tokens in, logits out
gain         how long a draft is worth its pass
drafts       guesses of the next tokens: look-up, a smaller model
speculation  answers fed with drafts, and what is accepted
session      one sequence: tokens in, logits out
sampling     how tokens are sampled: the settings
sampler      logits → a token
stops        stop strings
completion   logits in, pieces of text out, until something ends the answer
"""

from pyggml.generation.batch import Batch, Slot
from pyggml.generation.completion import Completion, Finish, Piece, complete, generate
from pyggml.generation.context import Context
from pyggml.generation.memory import CacheType
from pyggml.generation.sampler import Sampler, sample
from pyggml.generation.sampling import Sampling
from pyggml.generation.session import Session

__all__ = [
    "Batch", "CacheType", "Completion", "Context", "Finish", "Piece", "Sampler", "Sampling",
    "Session", "Slot", "complete", "generate", "sample",
]  # fmt: skip
