"""The maximum of a row of logits, and the sum of its exponentials; sums of the rows' losses.

Sums over rows are in float64, by one block, so that they do not depend on the grid.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.blocks import block_max, block_sum
from pyggml.backends.cuda.code.formulas import LOG2_E, ZERO, softcap
from pyggml.backends.cuda.code.fours import load_four, vectorizable
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.ops.reduce import row_sums
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.graph.call import Call

EACH = 4  # numbers that are moved at once
LOWEST = np.float32(-np.inf)


def sum_of(out: Any, terms: Any, stream: Any) -> Call:
    """A call for out = Σ terms, float32."""
    return row_sums(out, terms, terms.size, stream)


def lies_in_fours(z: Any, n: int) -> bool:
    """Whether all rows of n numbers begin and end where four are moved at once."""
    return n % EACH == 0 and vectorizable(z)


@device
def softcap_unless_out(z, cap):
    """Of what is taken out, -inf."""
    return softcap(z, cap) if cap > ZERO and z > LOWEST else z


@cache
def row_ends(in_fours: bool) -> Any:
    """What finds both ends of a row; in_fours: of rows that begin and end where four numbers are
    moved at once. Each thread has eight numbers under way."""
    n_each = 2 * EACH

    @device
    def load(eight, z, start, first, n, cap):
        apart = cuda.blockDim.x
        for e in range(0, n_each, EACH if in_fours else 1):
            j = first + e * apart + (EACH if in_fours else 1) * cuda.threadIdx.x
            if in_fours:
                four, is_inside = load_four(z, start + min(j, n - EACH)), j < n
                eight[e] = softcap_unless_out(four[0], cap) if is_inside else LOWEST
                eight[e + 1] = softcap_unless_out(four[1], cap) if is_inside else LOWEST
                eight[e + 2] = softcap_unless_out(four[2], cap) if is_inside else LOWEST
                eight[e + 3] = softcap_unless_out(four[3], cap) if is_inside else LOWEST
            else:
                eight[e] = softcap_unless_out(z[start + j], cap) if j < n else LOWEST

    @device
    def maximum_and_sum(z, start, n, cap, parts):
        """(maximum, Σ e^(z − maximum))"""
        top, total, eight = LOWEST, ZERO, cuda.local.array(n_each, np.float32)
        for first in range(0, n, n_each * cuda.blockDim.x):
            load(eight, z, start, first, n, cap)
            highest = top
            for e in range(n_each):
                highest = max(highest, eight[e])
            base = highest if highest > LOWEST else ZERO
            total *= ptx.power_of_two((top - base) * LOG2_E)
            for e in range(n_each):
                total += ptx.power_of_two((eight[e] - base) * LOG2_E)
            top = highest
        highest = block_max(top, parts)
        base = highest if highest > LOWEST else ZERO
        return highest, block_sum(total * math.exp(top - base), parts)

    return maximum_and_sum
