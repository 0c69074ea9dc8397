"""cuBLAS, through nvmath-python where it is installed: W is unpacked into scratch, a slice of rows
at a time, then multiplied. Its calls can be captured in a CUDA graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.driver import SIMULATED, cuda
from pyggml.backends.cuda.gemm.problem import Factor, Operands, Path, Problem
from pyggml.backends.cuda.launch import in_turn
from pyggml.backends.cuda.unpack import rounded, unpacked
from pyggml.call import Call
from pyggml.dtypes import BF16, F32
from pyggml.sizes import round_up

SLICE = 128 << 20  # bytes of unpacked weights that exist at once
_WORKSPACE = 32 << 20  # what NVIDIA recommends for Hopper
_LINE = 256
_R_32F, _R_16BF = 0, 14  # cudaDataType_t
_N, _T = 0, 1  # cublasOperation_t
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_MOST = (1 << 31) - 1  # sizes are 32 bits wide


@cache
def _library() -> Any:
    """nvmath's bindings of cuBLAS; None if there are none."""
    if SIMULATED:
        return None
    try:
        from nvmath.bindings import cublas
    except ImportError:
        return None
    return cublas


@cache
def _handle(stream: Any) -> tuple[int, Any]:
    """cuBLAS's handle of a stream, and the workspace that it holds."""
    library = _library()
    handle = library.create()
    workspace = cuda.device_array(_WORKSPACE, np.uint8)
    library.set_stream(handle, int(stream.handle))
    library.set_workspace(handle, _address(workspace), _WORKSPACE)
    return handle, workspace


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def _step(rows: int, f: Factor) -> tuple[int, int]:
    """(whether k is the near axis, elements between rows or columns) of an unpacked factor."""
    near_k = f.k == 1
    return near_k, f.row if near_k else f.k


def _lies_well(rows: int, k: int, f: Factor) -> bool:
    """Whether cuBLAS can read a float32 factor (rows, k): one axis without gaps, the other long
    enough."""
    if f.k == 1:
        return f.row >= k or rows == 1
    return f.row == 1 and f.k >= rows


def _takes(p: Problem) -> bool:
    if _library() is None or not p.is_single or max(p.m, p.n, p.k, p.a.row, p.a.k) > _MOST:
        return False
    if min(p.m, p.n, p.k) == 0:
        return False
    if p.b.dtype is F32:
        return _lies_well(p.m, p.k, p.a) and _lies_well(p.n, p.k, p.b)
    return p.a_is_whole and p.b.row * p.b.k == (p.k if p.b_in_rows else p.n)


def _rows(p: Problem) -> tuple[int, int]:
    """(rows of W, numbers of a row) of a packed W."""
    return (p.n, p.k) if p.b_in_rows else (p.k, p.n)


def _unpacked_size(p: Problem) -> int:
    return 2 if p.rounds else 4


def _slice_rows(p: Problem) -> int:
    rows, row = _rows(p)
    return min(rows, max(1, SLICE // (row * _unpacked_size(p))))


def _parts(p: Problem) -> tuple[int, int]:
    """Bytes of scratch for A in bfloat16 and for a slice of W."""
    if p.b.dtype is F32:
        return 0, 0
    a = 2 * p.m * p.k if p.rounds else 0
    is_ready = p.rounds and p.b.dtype is BF16
    w = 0 if is_ready else _slice_rows(p) * _rows(p)[1] * _unpacked_size(p)
    return round_up(a, _LINE), round_up(w, _LINE)


def _scratch(p: Problem) -> int:
    return sum(_parts(p))


def _multiply(
    stream: Any, sizes: tuple[int, int, int], a: Any, a_form: tuple[int, int], b: Any,
    b_form: tuple[int, int], c: Any, c_step: int, accumulate: bool,
) -> Call:  # fmt: skip
    """C (m, n) (+)= A · Bᵀ; forms are (whether k is the near axis, step of the other axis).

    cuBLAS counts columns first, so it is asked for Cᵀ = B · Aᵀ.
    """
    m, n, k = sizes
    kind = _R_32F if a.dtype == np.float32 else _R_16BF
    scalars = np.array([1, accumulate], np.float32)
    library, (handle, _) = _library(), _handle(stream)
    operations = (_T if b_form[0] else _N, _N if a_form[0] else _T)
    arguments = (
        handle, *operations, n, m, k, scalars.ctypes.data, _address(b), kind, b_form[1],
        _address(a), kind, a_form[1], scalars.ctypes.data + 4, _address(c), _R_32F, c_step,
        _COMPUTE_32F, _DEFAULT_ALGORITHM,
    )  # fmt: skip
    return Call(_gemm, library.gemm_ex, arguments, (a, b, c, scalars))


def _gemm(gemm_ex: Any, arguments: tuple[Any, ...], _kept: tuple[Any, ...]) -> None:
    gemm_ex(*arguments)


def _bind(p: Problem, o: Operands) -> Call:
    if p.b.dtype is F32:
        sizes = p.m, p.n, p.k
        forms = _form(p.m, p.k, p.a), _form(p.n, p.k, p.b)
        return _multiply(o.stream, sizes, o.a, forms[0], o.b, forms[1], o.c, p.n, o.accumulate)
    a_bytes, _ = _parts(p)
    calls, a = [], o.a
    if p.rounds:
        a = (o.scratch[: 2 * p.m * p.k] if o.rounded is None else o.rounded).view(np.uint16)
        if not o.is_rounded:
            calls.append(rounded(a, o.a, o.stream))
    return in_turn(*calls, *_by_slice(p, o, a, o.scratch[a_bytes:]))


def _form(rows: int, k: int, f: Factor) -> tuple[int, int]:
    near_k = f.k == 1
    step = f.row if near_k else f.k
    return near_k, max(step, k if near_k else rows)


def _by_slice(p: Problem, o: Operands, a: Any, memory: Any) -> list[Call]:
    """Unpack some rows of W, multiply with them, and so on."""
    (rows, row), size, block = _rows(p), _unpacked_size(p), p.b.dtype
    row_bytes, calls = block.row_bytes(row), []
    packed = o.b.view(np.uint8)
    for first in range(0, rows, _slice_rows(p)):
        some = min(_slice_rows(p), rows - first)
        raw = packed[first * row_bytes : (first + some) * row_bytes]
        if p.rounds and block is BF16:
            w = raw.view(np.uint16)
        else:
            w = memory[: some * row * size].view(np.uint16 if p.rounds else np.float32)
            calls.append(unpacked(w, raw, block, o.stream))
        if p.b_in_rows:
            sizes, c = (p.m, some, p.k), o.c[first:]
            forms = (True, p.k), (True, p.k)
            accumulate = o.accumulate
            calls.append(_multiply(o.stream, sizes, a, forms[0], w, forms[1], c, p.n, accumulate))
        else:
            sizes, columns = (p.m, p.n, some), a[first:]
            forms, accumulate = ((True, p.k), (False, p.n)), o.accumulate or first > 0
            calls.append(
                _multiply(o.stream, sizes, columns, forms[0], w, forms[1], o.c, p.n, accumulate)
            )
    return calls


CUBLAS = Path(name="cublas", takes=_takes, bind=_bind, scratch=_scratch, shares=True)
