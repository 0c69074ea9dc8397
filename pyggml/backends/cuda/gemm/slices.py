"""Products with an unpacked W: A is rounded once, W is unpacked a slice of rows at a time.

`Multiply` makes the call for C (m, n) (+)= A · Bᵀ of unpacked factors. The form of a factor is
(whether k is its near axis, elements from one row or column to the next).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.backends.cuda.gemm.problem import CudaOperands, CudaProblem
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.weights.unpack import round_to_bfloat16, unpack
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.sizes import round_up

SLICE = 128 << 20  # bytes of unpacked weights that exist at once
_ROWS = 64  # a slice has a multiple of so many rows, which keeps its columns of A aligned

Form = tuple[bool, int]
Multiply = Callable[..., Call]  # (stream, (m, n, k), a, Form, b, Form, c, step of c, accumulate)


def takes(p: CudaProblem) -> bool:
    """Whether the factors lie as they must: A may be turned if W needs no unpacking."""
    a_lies_well = p.a_is_whole or (_is_ready(p) and _is_turned(p))
    return a_lies_well and p.b.row * p.b.k == (p.k if p.b_in_rows else p.n)


def _is_turned(p: CudaProblem) -> bool:
    """Whether A is one matrix whose columns lie one after the other."""
    return p.is_single and p.a.row == 1 and p.a.k == p.m


def _rows(p: CudaProblem) -> tuple[int, int]:
    """(rows of W, numbers of a row)."""
    return (p.n, p.k) if p.b_in_rows else (p.k, p.n)


def _is_rounded(p: CudaProblem) -> bool:
    """Whether A is given in bfloat16."""
    return p.a.dtype is BF16


def _number_size(p: CudaProblem) -> int:
    return 2 if p.rounds else 4


def _is_ready(p: CudaProblem) -> bool:
    """Whether W is multiplied as it lies in memory."""
    return p.rounds and p.b.dtype is BF16


def _slice_rows(p: CudaProblem) -> int:
    rows, row = _rows(p)
    if _is_ready(p):
        return rows
    most = SLICE // (row * _number_size(p)) // _ROWS * _ROWS
    return min(rows, max(_ROWS, most))


def _parts(p: CudaProblem) -> tuple[int, int]:
    """Bytes of scratch for A in bfloat16, and for a slice of W."""
    a = 2 * p.m * p.k if p.rounds and not _is_rounded(p) else 0
    w = 0 if _is_ready(p) else _slice_rows(p) * _rows(p)[1] * _number_size(p)
    return round_up(a, ALIGNMENT), round_up(w, ALIGNMENT)


def scratch(p: CudaProblem) -> int:
    return sum(_parts(p))


def bind(p: CudaProblem, o: CudaOperands, multiply: Multiply) -> Call:
    calls, a = [], o.a
    if p.rounds and not _is_rounded(p):
        a = (o.scratch[: 2 * p.m * p.k] if o.rounded is None else o.rounded).view(np.uint16)
        if not o.is_rounded:
            calls.append(round_to_bfloat16(a, o.a, o.stream))
    memory = o.scratch[_parts(p)[0] if o.rounded is None else 0 :]
    for first in range(0, _rows(p)[0], _slice_rows(p)):
        calls += _slice(p, o, multiply, a, memory, first)
    return in_turn(*calls)


def _slice(
    p: CudaProblem, o: CudaOperands, multiply: Multiply, a: Any, memory: Any, first: int
) -> list[Call]:
    """Unpack rows of W from `first` on, and multiply with them."""
    (rows, row), kind = _rows(p), p.b.dtype
    n_rows, n_bytes = min(_slice_rows(p), rows - first), kind.row_bytes(row)
    w = o.b.view(np.uint8)[first * n_bytes : (first + n_rows) * n_bytes]
    calls = []
    if _is_ready(p):
        w = w.view(np.uint16)
    else:
        raw, number = w, np.uint16 if p.rounds else np.float32
        w = memory[: n_rows * row * _number_size(p)].view(number)
        calls.append(unpack(w, raw, kind, o.stream))
    if p.b_in_rows:
        sizes, c, columns = (p.m, n_rows, p.k), o.c[first:], a
        form, accumulate = (True, p.k), o.accumulate
    else:
        sizes, c, columns = (p.m, p.n, n_rows), o.c, a[first:]
        form, accumulate = (False, p.n), o.accumulate or first > 0
    of_a = (True, o.rounded_step or p.k) if p.a_is_whole else (False, p.m)
    calls.append(multiply(o.stream, sizes, columns, of_a, w, form, c, p.n, accumulate))
    return calls
