"""The slow twins: unpack the whole matrix, let NumPy multiply. Oracle of pyggml.gemm.product."""

from __future__ import annotations

import numpy as np

from pyggml.dtypes import DType
from pyggml.quants import dequantize


def forward(y: np.ndarray, x: np.ndarray, w: np.ndarray, dtype: DType, accumulate: bool) -> None:
    """y (+)= x · wᵀ."""
    _put(y, x @ dequantize(w, dtype.name).T, accumulate)


def backward(dx: np.ndarray, dy: np.ndarray, w: np.ndarray, dtype: DType, accumulate: bool) -> None:
    """dx (+)= dy · w."""
    _put(dx, dy @ dequantize(w, dtype.name), accumulate)


def strided(c: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool) -> None:
    """c (+)= a · bᵀ for every batch; a and b are repeated as ggml broadcasts."""
    left = np.repeat(a, c.shape[0] // a.shape[0], axis=0)
    right = np.repeat(b, c.shape[0] // b.shape[0], axis=0)
    _put(c, left @ right.swapaxes(1, 2), accumulate)


def _put(out: np.ndarray, value: np.ndarray, accumulate: bool) -> None:
    if accumulate:
        out += value
    else:
        out[...] = value
