"""Models that have learned nothing: a vocabulary of a text, sizes, weights at random.

vocabulary   a text → the tokens of a GGUF file
sizes        an architecture and a number of parameters → hyperparameters
initial      a tensor's name and shape → the numbers that training starts from; rwkv: RWKV's
write        all three → a GGUF file, which trains and which llama.cpp loads
"""

from pyggml.fresh.sizes import count, hyperparameters
from pyggml.fresh.vocabulary import KINDS, vocabulary_fields
from pyggml.fresh.write import Fresh, write

__all__ = ["KINDS", "Fresh", "count", "hyperparameters", "vocabulary_fields", "write"]
