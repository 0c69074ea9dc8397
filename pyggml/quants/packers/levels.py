"""Levels of packed blocks: x = offset + step · value(level), and how levels lie in the bytes.

A type that stands here can have the levels of a block replaced, while its scales stay. Offsets and
steps are read off the decoder, with all levels lowest and all highest, so that they are told once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyggml.quants.bits import two_bit_planes
from pyggml.quants.unpack import UNPACK


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a type.

    values   (n,) float32, ascending: what each level stands for, times step and plus offset
    put      put(dst, q): writes levels q, uint8 (n_blocks, block), into blocks uint8 (n_blocks,
             block_bytes)
    """

    values: np.ndarray
    put: Callable[[np.ndarray, np.ndarray], None]

    @property
    def is_even(self) -> bool:
        """Whether each value is one more than the value before."""
        return bool((np.diff(self.values) == 1).all())

    def grid(self, name: str, blocks: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Offset and step, float32 (n_blocks, block) each, of every weight of the blocks."""
        ends = []
        for level in (0, len(self.values) - 1):
            filled = blocks.copy()
            self.put(filled, np.full((len(blocks), block), level, np.uint8))
            x = np.empty((len(blocks), block), np.float32)
            UNPACK[name](x, filled, len(filled))
            ends.append(x)
        step = (ends[1] - ends[0]) / np.float32(self.values[-1] - self.values[0])
        return ends[0] - step * self.values[0], step


def put_nibbles(dst: np.ndarray, q: np.ndarray, at: int, half: int) -> None:
    """The low 4 bits of q behind `at` bytes: byte j of `half` bytes holds weight j (low) of a
    sub-block and weight j + half (high)."""
    two = (q & 15).reshape(len(q), -1, 2, half)
    packed = (two[:, :, 0] | two[:, :, 1] << 4).reshape(len(q), -1)
    dst[:, at : at + packed.shape[1]] = packed


def put_fifths(dst: np.ndarray, q: np.ndarray, at: int) -> None:
    """The fifth bits of 32 levels: bit j of 4 bytes belongs to weight j."""
    dst[:, at : at + 4] = np.packbits(q >> 4, axis=1, bitorder="little")


def _put_bytes(dst: np.ndarray, q: np.ndarray) -> None:
    dst[:, 2:] = q - np.uint8(127)


def _put_five(dst: np.ndarray, q: np.ndarray, *, at: int) -> None:
    put_fifths(dst, q, at)
    put_nibbles(dst, q, at + 4, 16)


def _put_q5_k(dst: np.ndarray, q: np.ndarray) -> None:
    put_nibbles(dst, q, 48, 32)
    dst[:, 16:48] = np.packbits(q.reshape(-1, 8, 32) >> 4, axis=1, bitorder="little")[:, 0]


def _put_q6_k(dst: np.ndarray, q: np.ndarray) -> None:
    put_nibbles(dst, q, 0, 64)
    dst[:, 128:192] = two_bit_planes(q >> 4)


def _put_q2_k(dst: np.ndarray, q: np.ndarray) -> None:
    dst[:, 16:80] = two_bit_planes(q)


def _put_q3_k(dst: np.ndarray, q: np.ndarray) -> None:
    dst[:, :32] = np.packbits(q.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little")[:, 0]
    dst[:, 32:96] = two_bit_planes(q)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# MXFP4's and NVFP4's numbers, twice, and the nibble of each; 0 is nibble 0.
_FP4 = (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12)
_FP4_NIBBLES = np.array([*range(15, 8, -1), *range(8)], np.uint8)


def _put_fp4(dst: np.ndarray, q: np.ndarray, *, at: int, half: int) -> None:
    put_nibbles(dst, _FP4_NIBBLES[q], at, half)


def _even(n: int, put: Callable[[np.ndarray, np.ndarray], None], first: int = 0) -> Levels:
    return Levels(np.arange(first, first + n).astype(np.float32), put)


def _table(values: tuple[int, ...], put: Callable[[np.ndarray, np.ndarray], None]) -> Levels:
    return Levels(np.array(values, np.float32), put)


LEVELS: dict[str, Levels] = {
    "Q8_0": _even(255, _put_bytes, -127),
    "Q4_0": _even(16, partial(put_nibbles, at=2, half=16)),
    "Q4_1": _even(16, partial(put_nibbles, at=4, half=16)),
    "Q5_0": _even(32, partial(_put_five, at=2)),
    "Q5_1": _even(32, partial(_put_five, at=4)),
    "Q2_K": _even(4, _put_q2_k),
    "Q3_K": _even(8, _put_q3_k),
    "Q4_K": _even(16, partial(put_nibbles, at=16, half=32)),
    "Q5_K": _even(32, _put_q5_k),
    "Q6_K": _even(64, _put_q6_k),
    "IQ4_NL": _table(_IQ4, partial(put_nibbles, at=2, half=16)),
    "IQ4_XS": _table(_IQ4, partial(put_nibbles, at=8, half=16)),
    "MXFP4": _table(_FP4, partial(_put_fp4, at=1, half=16)),
    "NVFP4": _table(_FP4, partial(_put_fp4, at=4, half=8)),
}
