"""Arithmetic with sizes."""

from typing import TypeVar

import numpy as np

N = TypeVar("N", int, np.ndarray)


def round_up(n: N, multiple: int) -> N:
    """The smallest multiple of `multiple` that is n or more."""
    return -(-n // multiple) * multiple
