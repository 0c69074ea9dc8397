"""How far one array is from another."""

import numpy as np

from pyggml.graph.dtypes import dtype


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    """Mean square error in units of the mean square, in float64."""
    exact = wanted.astype(np.float64)
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


def misplaced_by_ggml(name: str, x: np.ndarray) -> np.ndarray:
    """The blocks, (n_blocks,), that ggml packs wrongly: behind 32 zeros, its IQ3_S puts weights
    where those before them belong."""
    if name != "IQ3_S":
        return np.zeros(x.size // dtype(name).block, bool)
    zero = (x.reshape(-1, 8, 32) == 0).all(axis=2)
    return (zero[:, :-1] & ~zero[:, 1:]).any(axis=1)
