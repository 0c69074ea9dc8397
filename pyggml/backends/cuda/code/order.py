"""The order of float32 numbers as that of whole numbers, which may hold a place besides."""

import numpy as np

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.ptx import bits_of

_SIGN, _ALL = 1 << 31, (1 << 32) - 1


@device
def order_of(x):
    """A whole number (int64) below 2^32 that is greater the greater x is, -0 like 0; NaN has none
    of its own."""
    bits = np.int64(bits_of(x + ZERO))
    return _ALL - bits if bits & _SIGN else bits | _SIGN
