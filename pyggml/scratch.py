"""Scratch: one array of bytes, cut into the arrays that a kernel works in.

A layout says both how much is needed, before there is memory, and which part is what.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from pyggml.sizes import round_up

LINE = 64  # bytes of a cache line, at which every array begins


@dataclass(frozen=True, slots=True)
class Array:
    """An array to be cut out of scratch."""

    shape: tuple[int, ...]
    dtype: type[np.generic] = np.float32

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def over(self, memory: np.ndarray) -> np.ndarray:
        """This array over the first bytes of uint8 memory; ValueError if that is too short."""
        return memory[: self.n_bytes].view(self.dtype).reshape(self.shape)


class Layout:
    """Arrays one after the other."""

    def __init__(self, *arrays: Array) -> None:
        self.arrays = arrays

    @property
    def n_bytes(self) -> int:
        return sum(round_up(a.n_bytes, LINE) for a in self.arrays)

    def cut(self, scratch: np.ndarray) -> list[np.ndarray]:
        """The arrays, in order, over uint8 scratch of n_bytes or more."""
        found, start = [], 0
        for a in self.arrays:
            found.append(a.over(scratch[start:]))
            start += round_up(a.n_bytes, LINE)
        return found
