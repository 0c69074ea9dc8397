"""Scratch: one array of bytes, cut into the arrays that a kernel works in.

A layout says both how much is needed, before there is memory, and which part is what.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from pyggml import threads
from pyggml.sizes import round_up

LINE = 64  # bytes of a cache line, at which every array begins

Scratch = dict[str, np.ndarray]  # a layout's arrays by name


@dataclass(frozen=True, slots=True)
class Array:
    """An array to be cut out of scratch; of_threads: its first axis is the threads', none of whom
    finds there what it left."""

    shape: tuple[int, ...]
    dtype: type[np.generic] = np.float32
    of_threads: bool = False

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def over(self, memory: np.ndarray, start: int = 0) -> np.ndarray:
        """This array over uint8 memory, from byte `start` on; TypeError if that is too short."""
        return np.ndarray(self.shape, self.dtype, memory, start)


def per_thread(*shape: int, dtype: type[np.generic] = np.float32) -> Array:
    """An array of this shape for each thread: (threads, *shape)."""
    return Array((threads.most(), *shape), dtype, of_threads=True)


class Layout:
    """Named arrays one after the other.

    Layout(packed_a=Array((n,)), scratch=per_thread(m))
    """

    def __init__(self, **arrays: Array) -> None:
        self.arrays, self.n_bytes = arrays, 0
        self._starts: dict[str, int] = {}
        for name, a in arrays.items():
            self._starts[name] = self.n_bytes
            self.n_bytes += round_up(a.n_bytes, LINE)

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def followed_by(self, **arrays: Array) -> Layout:
        """These arrays, then others."""
        return Layout(**self.arrays, **arrays)

    def cut(self, scratch: np.ndarray) -> Scratch:
        """The arrays over uint8 scratch of n_bytes or more."""
        return {name: a.over(scratch, self._starts[name]) for name, a in self.arrays.items()}
