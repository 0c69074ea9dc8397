"""cuBLAS, through nvmath-python where it is installed; a CUDA graph can capture its calls.

Of a product with weights, A is rounded once, and W is unpacked a slice of rows at a time. The form
of a factor is (whether k is its near axis, elements from one row or column to the next).
"""

from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

from pyggml.backends.cuda.gemm.problem import (
    CudaOperands,
    CudaProblem,
    CudaProductPath,
    bytes_of_rounded,
    rounded,
)
from pyggml.backends.cuda.runtime.driver import address, cuda
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT
from pyggml.backends.cuda.runtime.launches import in_turn, of_library
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.cuda.weights.unpack import unpack
from pyggml.backends.kit.products import Factor
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.sizes import round_up

Form = tuple[bool, int]
_WORKSPACE = 32 << 20  # what NVIDIA recommends for Hopper; with 8, thin products take twice as long
_AT_ONCE = 4  # products that can run side by side
_R_32F, _R_16BF = 0, 14  # cudaDataType_t
_N, _T = 0, 1  # cublasOperation_t
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
SLICE = 128 << 20  # bytes of unpacked weights that exist at once
_ROWS = 64  # a slice has a multiple of so many rows, which keeps its columns of A aligned
_LARGEST_SIZE = (1 << 31) - 1  # its sizes are 32 bits wide


@cache
@on_card
def _library() -> Any:
    """nvmath's bindings of cuBLAS; None if there are none."""
    try:
        from nvmath.bindings import cublas
    except ImportError:
        return None
    return cublas


def has_cublas() -> bool:
    """Whether cuBLAS can be used."""
    return _library() is not None


@cache
def _handles(stream: Any) -> Iterator[tuple[int, Any]]:
    """cuBLAS's handles of a stream, one after the other for ever; each has its own workspace."""
    return cycle([_handle(stream) for _ in range(_AT_ONCE)])


def workspaces() -> int:
    """Bytes of a stream's workspaces."""
    return 0 if _library() is None else _AT_ONCE * _WORKSPACE


def _handle(stream: Any) -> tuple[int, Any]:
    library = _library()
    handle = library.create()
    workspace = cuda.device_array(_WORKSPACE, np.uint8)
    library.set_stream(handle, int(stream.handle))
    library.set_workspace(handle, address(workspace), _WORKSPACE)
    return handle, workspace


def _lies_well(rows: int, k: int, f: Factor) -> bool:
    """Whether cuBLAS can read a float32 factor (rows, k): one axis without gaps, the other long
    enough."""
    if f.k == 1:
        return f.row >= k or rows == 1
    return f.row == 1 and f.k >= rows


def multiply(
    stream: Any, sizes: tuple[int, int, int], a: Any, a_form: Form, b: Any, b_form: Form,
    c: Any, c_step: int, accumulate: bool, factor: float = 1.0,
) -> Call:  # fmt: skip
    """C (m, n) (+)= factor · A · Bᵀ of unpacked factors.

    cuBLAS counts columns first, so it is asked for Cᵀ = B · Aᵀ.
    """
    m, n, k = sizes
    kind, result_kind = (_R_32F if x.dtype == np.float32 else _R_16BF for x in (a, c))
    scalars = np.array([factor, accumulate], np.float32)
    library, (handle, workspace) = _library(), next(_handles(stream))
    operations = (_T if b_form[0] else _N, _N if a_form[0] else _T)
    return of_library(
        library.gemm_ex, handle, *operations, n, m, k, scalars.ctypes.data, address(b), kind,
        b_form[1], address(a), kind, a_form[1], scalars.ctypes.data + 4, address(c), result_kind,
        c_step, _COMPUTE_32F, _DEFAULT_ALGORITHM, reads=(a, b), writes=(c, workspace),
        keeps=scalars,
    )  # fmt: skip


# -- products with weights -----------------------------------------------------------------------


def _takes_unpacked(p: CudaProblem) -> bool:
    """Whether the factors lie as they must: A may be turned if W needs no unpacking."""
    a_lies_well = p.a_is_whole or (_is_ready(p) and _is_turned(p))
    return a_lies_well and p.b_is_whole


def _is_turned(p: CudaProblem) -> bool:
    """Whether A is one matrix whose columns lie one after the other."""
    return p.is_single and p.a.row == 1 and p.a.k == p.m


def _rows(p: CudaProblem) -> tuple[int, int]:
    """(rows of W, numbers of a row)."""
    return (p.n, p.k) if p.b_in_rows else (p.k, p.n)


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
    w = 0 if _is_ready(p) else _slice_rows(p) * _rows(p)[1] * _number_size(p)
    return bytes_of_rounded(p), round_up(w, ALIGNMENT)


def _bind_slices(p: CudaProblem, o: CudaOperands) -> Call:
    a, calls = rounded(p, o)
    memory = o.scratch[_parts(p)[0] if o.rounded is None else 0 :]
    for first in range(0, _rows(p)[0], _slice_rows(p)):
        calls += _slice(p, o, a, memory, first)
    return in_turn(*calls)


def _slice(p: CudaProblem, o: CudaOperands, a: Any, memory: Any, first: int) -> list[Call]:
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


# -- the path ------------------------------------------------------------------------------------


def _takes(p: CudaProblem) -> bool:
    if not has_cublas() or not p.is_single or max(p.m, p.n, p.k, p.a.row, p.a.k) > _LARGEST_SIZE:
        return False
    if min(p.m, p.n, p.k) == 0:
        return False
    if p.b.dtype is F32:
        return _lies_well(p.m, p.k, p.a) and _lies_well(p.n, p.k, p.b)
    return _takes_unpacked(p)


def _scratch(p: CudaProblem) -> int:
    return 0 if p.b.dtype is F32 else sum(_parts(p))


def _bind(p: CudaProblem, o: CudaOperands) -> Call:
    if p.b.dtype is not F32:
        return _bind_slices(p, o)
    sizes = p.m, p.n, p.k
    forms = _form(p.m, p.k, p.a), _form(p.n, p.k, p.b)
    return multiply(o.stream, sizes, o.a, forms[0], o.b, forms[1], o.c, p.n, o.accumulate, o.factor)


def _form(rows: int, k: int, f: Factor) -> Form:
    near_k = f.k == 1
    step = f.row if near_k else f.k
    return near_k, max(step, k if near_k else rows)


CUBLAS = CudaProductPath(
    name="cublas", takes=_takes, bind=_bind, scratch=_scratch, shares=True, scales=True
)
