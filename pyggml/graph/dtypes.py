"""Tensor types: ggml's name and number, elements and bytes of a block."""

from dataclasses import dataclass

import numpy as np

from pyggml.errors import QuantError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One ggml type; each is one object.

    block         elements in a block; 1 for plain types
    block_bytes   bytes of a block
    numpy         dtype of its arrays: uint8 for quantised types, with shape (*shape[:-1],
                  row_bytes); uint16 for BF16, which NumPy lacks
    """

    name: str
    number: int
    block: int
    block_bytes: int
    numpy: np.dtype

    @property
    def quantised(self) -> bool:
        return self.block > 1

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n elements. QuantError if n is no multiple of `block`."""
        if n % self.block:
            raise QuantError(
                f"a row of {n} elements is not a multiple of {self.name}'s {self.block}"
            )
        return n // self.block * self.block_bytes

    def __repr__(self) -> str:
        return self.name


def _plain(name: str, number: int, numpy: type) -> DType:
    return DType(name, number, 1, np.dtype(numpy).itemsize, np.dtype(numpy))


def _blocks(name: str, number: int, block: int, block_bytes: int) -> DType:
    return DType(name, number, block, block_bytes, np.dtype(np.uint8))


F32 = _plain("F32", 0, np.float32)
F16 = _plain("F16", 1, np.float16)
BF16 = _plain("BF16", 30, np.uint16)
HALVES = (F16, BF16)  # of F32's width
F64 = _plain("F64", 28, np.float64)
I8 = _plain("I8", 24, np.int8)
I16 = _plain("I16", 25, np.int16)
I32 = _plain("I32", 26, np.int32)
I64 = _plain("I64", 27, np.int64)
Q8_0 = _blocks("Q8_0", 8, 32, 34)

# ggml.h's enum ggml_type and the block structs of ggml-common.h.
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        *(F32, F16, BF16, F64, I8, I16, I32, I64),
        _blocks("Q4_0", 2, 32, 18),
        _blocks("Q4_1", 3, 32, 20),
        _blocks("Q5_0", 6, 32, 22),
        _blocks("Q5_1", 7, 32, 24),
        Q8_0,
        _blocks("Q8_1", 9, 32, 36),
        _blocks("Q2_K", 10, 256, 84),
        _blocks("Q3_K", 11, 256, 110),
        _blocks("Q4_K", 12, 256, 144),
        _blocks("Q5_K", 13, 256, 176),
        _blocks("Q6_K", 14, 256, 210),
        _blocks("Q8_K", 15, 256, 292),
        _blocks("IQ2_XXS", 16, 256, 66),
        _blocks("IQ2_XS", 17, 256, 74),
        _blocks("IQ3_XXS", 18, 256, 98),
        _blocks("IQ1_S", 19, 256, 50),
        _blocks("IQ4_NL", 20, 32, 18),
        _blocks("IQ3_S", 21, 256, 110),
        _blocks("IQ2_S", 22, 256, 82),
        _blocks("IQ4_XS", 23, 256, 136),
        _blocks("IQ1_M", 29, 256, 56),
        _blocks("TQ1_0", 34, 256, 54),
        _blocks("TQ2_0", 35, 256, 66),
        _blocks("MXFP4", 39, 32, 17),
        _blocks("NVFP4", 40, 64, 36),
        _blocks("Q1_0", 41, 128, 18),
        _blocks("Q2_0", 42, 64, 18),
    )
}
BY_NUMBER: dict[int, DType] = {d.number: d for d in DTYPES.values()}


def dtype(name: str) -> DType:
    """The type of this name, in any case. QuantError lists the known names."""
    try:
        return DTYPES[name.upper()]
    except KeyError:
        raise QuantError(f"{name!r} is not a tensor type; known are {', '.join(DTYPES)}") from None
