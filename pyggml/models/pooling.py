"""Texts as one vector each: the hidden states of their tokens, pooled.

pooling   a text's vector
mean      the mean of its tokens' hidden states
cls       that of its first token, [CLS] of BERT
last      that of its last token, which alone has seen all of a causal text

The numbers are llama.cpp's (`POOLINGS`): `none` pools nothing, `rank` is the score that a
classifier gives a text (pyggml.models.classifier).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor, zeros
from pyggml.models.config import ModelConfig
from pyggml.ops import cont, get_rows, mul_mat, permute

POOLED = ("mean", "cls", "last")


@dataclass(frozen=True, slots=True)
class Pool:
    """Which tokens of a pass make up the vectors of n texts: a leaf, filled for each pass.

    pooling   one of POOLED
    leaf      of the mean (n, T) float32, 1 / length at a text's tokens; else (n,) int32, the token
    """

    pooling: str
    leaf: Tensor

    @classmethod
    def empty(cls, pooling: str, n_texts: int, n_tokens: int) -> "Pool":
        if pooling == "mean":
            return cls(pooling, zeros((n_texts, n_tokens), F32, "pool"))
        return cls(pooling, zeros((n_texts,), I32, "pool"))

    def fill(self, spans: Sequence[tuple[int, int]]) -> None:
        """Say where the texts are: [first, end) among the tokens. Of n texts some may lack: the
        mean of those is 0, and others have the pass's first token."""
        write(self.leaf, self.values(spans))

    def values(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """What `fill` writes into the leaf."""
        values = np.zeros(self.leaf.shape, self.leaf.dtype.numpy)
        for i, (first, end) in enumerate(spans):
            if self.pooling == "mean":
                values[i, first:end] = 1 / (end - first)
            else:
                values[i] = first if self.pooling == "cls" else end - 1
        return values


def pooled(hidden: Tensor, pool: Pool) -> Tensor:
    """The vectors (n, n_embd) of n texts, of the hidden states (T, n_embd) of a pass's tokens."""
    if pool.pooling == "mean":
        return mul_mat(cont(permute(hidden, (1, 0))), pool.leaf)
    return get_rows(hidden, pool.leaf)


def usual_pooling(config: ModelConfig) -> str:
    """How a model's texts are pooled where nobody says: as its file does, or by the last token of
    a causal text, the one that has seen it all, or by the mean."""
    if config.pooling not in (None, "none"):
        return config.pooling
    return "last" if config.causal else "mean"
