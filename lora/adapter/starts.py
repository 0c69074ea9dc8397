"""Initial values of an update's A and B.

kaiming   A ~ uniform(−1/√n_in, 1/√n_in), B = 0: nothing changes at first. For the token embedding
          A = 0 and B ~ normal(0, 1): tokens that never occur never change. Both are PEFT's
          (Kaiming with a = √5).
pissa     W ≈ U S Vᵀ, its r largest directions:  A = √(S / s) Vᵀ,  B = U √(S / s)  at scale s, so
          that s·BA is the principal part of W (Meng et al. 2024, arXiv:2404.02948)
loftq     the same of W − Q, what quantising the original W took (Li et al. 2023, arXiv:2310.08659,
          whose quantiser is then run again; here Q is the file's and stays)

Every tensor has a random stream of its own, given by seed and tensor name.
"""

from zlib import crc32

import numpy as np

from pyggml.errors import NotFiniteError
from pyggml.graph.arrays import read
from pyggml.graph.tensor import Shape, Tensor
from pyggml.quants import dequantize

_EXACT = 256  # rows or columns up to which the whole decomposition is made
_MORE = 16  # directions beyond those wanted: the wanted ones are then found well
_ROUNDS = 8  # of the power iteration


def unpack(w: Tensor) -> np.ndarray:
    """A weight's numbers as float32."""
    return np.asarray(dequantize(read(w), w.dtype.name), np.float32)


def kaiming(seed: int, name: str, shape: Shape, normal: bool) -> np.ndarray:
    rng = _stream(seed, name)
    if normal:
        return rng.standard_normal(shape, np.float32)
    bound = shape[-1] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def pissa(w: np.ndarray, rank: int, scale: float, seed: int, name: str) -> tuple[np.ndarray, ...]:
    """A (rank, n_in) and B (n_out, rank) float32 with scale · BA ≈ the principal part of w.

    Raises NotFiniteError for a w that has numbers that are NaN or infinite.
    """
    if not np.isfinite(w).all():
        raise NotFiniteError(f"{name}: not finite: no adapter can start from its numbers")
    if min(w.shape) <= _EXACT:
        u, s, v = np.linalg.svd(w, full_matrices=False)
    else:
        u, s, v = _largest(w, rank + _MORE, _stream(seed, name))
    root = np.sqrt(s[:rank] / np.float32(scale))
    return root[:, None] * v[:rank], u[:, :rank] * root


def _largest(w: np.ndarray, n: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """The n largest singular directions of w, nearly, in memory for n of its rows and columns.

    A randomised SVD with power iteration (Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1).
    """
    n = min(n, *w.shape)
    q, _ = np.linalg.qr(w @ rng.standard_normal((w.shape[1], n), np.float32))
    for _ in range(_ROUNDS):
        p, _ = np.linalg.qr(w.T @ q)
        q, _ = np.linalg.qr(w @ p)
    u, s, v = np.linalg.svd(q.T @ w, full_matrices=False)
    return q @ u, s, v


def row_squares(w: np.ndarray) -> np.ndarray:
    """‖w_i‖² (n_out,) float32 of each row, bitwise the same for any number of threads."""
    return np.array([np.sum(np.square(row, dtype=np.float64)) for row in w], np.float32)


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(name.encode())]))
