"""Importance matrices for the types that are packed by one alone."""

import numpy as np

from pyggml import gguf
from pyggml.requantize.imatrix import ImportanceMatrix, InputSums

BY_IMPORTANCE = (
    *("Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)


def random_importance(path):
    """Of all matrices of a file's blocks; other tensors have none in any model."""
    rng = np.random.default_rng(6)
    with gguf.open(path) as file:
        shapes = {n: t.shape for n, t in file.tensors.items() if n.startswith("blk.")}
    sums = {
        n: InputSums(rng.chisquare(3, (1, s[-1])).astype(np.float32), np.ones(1, np.float32))
        for n, s in shapes.items()
        if len(s) == 2
    }
    return ImportanceMatrix(sums, (), 1, 1)
