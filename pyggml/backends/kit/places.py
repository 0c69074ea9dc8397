"""Where a tensor's numbers lie in a device's memory, and how the host sees a copy of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """What `Tensor.data` holds on a device: a buffer, and the tensor's first byte in it."""

    buffer: Any
    offset: int


def span(t: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if t.is_contiguous:
        return t.n_bytes
    if not t.n_elements:
        return 0
    whole = t.dtype.row_bytes(t.shape[-1]) if t.dtype.quantised else t.dtype.block_bytes
    last = len(t.shape) - 1 if t.dtype.quantised else len(t.shape)
    steps = zip(t.shape[:last], t.strides[:last], strict=True)
    return whole + sum((n - 1) * step for n, step in steps)


def host_view(t: Tensor, spanned: np.ndarray) -> np.ndarray:
    """The tensor's array in those bytes on the host: rows of quantised types as bytes."""
    shape, strides = t.shape, t.strides
    if t.dtype.quantised:
        shape, strides = (*shape[:-1], t.dtype.row_bytes(shape[-1])), (*strides[:-1], 1)
    return np.ndarray(shape, t.dtype.numpy, spanned, 0, strides)
