"""Keys and values that a cache keeps in half precision, as the float32 that tiles take."""

from __future__ import annotations

from math import prod

import numpy as np

from pyggml._jit import JIT, parallel, prange
from pyggml.call import Call
from pyggml.dtypes import F16
from pyggml.quants.bits import half_to_float
from pyggml.tensor import Tensor


def readable(a: np.ndarray) -> np.ndarray:
    """The array as kernels take it that read numbers by `as_float`: halves as their bits."""
    return a.view(np.uint16) if JIT and a.dtype == np.float16 else a


def n_floats(*sides: Tensor) -> int:
    """Numbers of those that are halves: scratch of `widened`."""
    return sum(t.n_elements for t in sides if t.dtype is F16)


def widened(sides: tuple[np.ndarray, ...], floats: np.ndarray) -> tuple[np.ndarray, ...]:
    """Float32 arrays for those that are halves, one after the other in `floats`; else themselves.

    What stands in them is for `after_widening` to say.
    """
    found = []
    for a in sides:
        if a.dtype == np.float16:
            n = prod(a.shape)
            a, floats = floats[:n].reshape(a.shape), floats[n:]
        found.append(a)
    return tuple(found)


def after_widening(
    span: np.ndarray, sides: tuple[np.ndarray, ...], wide: tuple[np.ndarray, ...], call: Call
) -> Call:
    """The call, which reads wide = widened(sides, …), after all rows that a query sees are there.

    A cache is mostly empty: no other row is widened.
    """
    pairs = [
        (to.reshape(len(to), -1), a.reshape(len(a), -1).view(np.uint16))
        for a, to in zip(sides, wide, strict=True)
        if a is not to
    ]
    return Call(_widen_seen, span, pairs, call) if pairs else call


def _widen_seen(span: np.ndarray, pairs: list[tuple[np.ndarray, np.ndarray]], call: Call) -> None:
    used = int(span[:, 1].max(initial=0))
    for floats, bits in pairs:
        _widen(floats[:used], bits[:used])
    call()


@parallel
def _widen(floats, bits):
    for i in prange(floats.shape[0]):
        for j in range(floats.shape[1]):
            floats[i, j] = half_to_float(bits[i, j])
