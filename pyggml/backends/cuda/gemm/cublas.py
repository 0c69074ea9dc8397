"""cuBLAS, through nvmath-python where it is installed; a CUDA graph can capture its calls."""

from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

from pyggml.backends.cuda.gemm import slices
from pyggml.backends.cuda.gemm.one_wave import GemmForm, OneWave, algorithm_of
from pyggml.backends.cuda.gemm.problem import CudaOperands, CudaProblem, CudaProductPath
from pyggml.backends.cuda.gemm.slices import Form
from pyggml.backends.cuda.runtime.driver import address, cuda
from pyggml.backends.cuda.runtime.launches import of_library
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.kit.products import Factor
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32

_WORKSPACE = 32 << 20  # what NVIDIA recommends for Hopper; with 8, thin products take twice as long
_AT_ONCE = 4  # products that can run side by side
_R_32F, _R_16BF = 0, 14  # cudaDataType_t
_N, _T = 0, 1  # cublasOperation_t
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_ALIGNMENT = 16  # bytes of each matrix, that cublasLt wants for its tiles
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


def _takes(p: CudaProblem) -> bool:
    if not has_cublas() or not p.is_single or max(p.m, p.n, p.k, p.a.row, p.a.k) > _LARGEST_SIZE:
        return False
    if min(p.m, p.n, p.k) == 0:
        return False
    if p.b.dtype is F32:
        return _lies_well(p.m, p.k, p.a) and _lies_well(p.n, p.k, p.b)
    return slices.takes(p)


def _scratch(p: CudaProblem) -> int:
    return 0 if p.b.dtype is F32 else slices.scratch(p)


def multiply(
    stream: Any, sizes: tuple[int, int, int], a: Any, a_form: Form, b: Any, b_form: Form,
    c: Any, c_step: int, accumulate: bool, factor: float = 1.0,
) -> Call:  # fmt: skip
    """C (m, n) (+)= factor · A · Bᵀ; a form is (whether k is the near axis, the other one's step).

    cuBLAS counts columns first, so it is asked for Cᵀ = B · Aᵀ.
    """
    m, n, k = sizes
    kind, result_kind = (_R_32F if x.dtype == np.float32 else _R_16BF for x in (a, c))
    scalars = np.array([factor, accumulate], np.float32)
    (handle, workspace), gemm = next(_handles(stream)), _library().gemm_ex
    operations = (_T if b_form[0] else _N, _N if a_form[0] else _T)
    form = GemmForm(operations, (n, m, k), (kind, result_kind), (b_form[1], a_form[1], c_step))
    one = algorithm_of(handle, form) if kind == _R_16BF else None
    if one is not None and all(address(x) % _ALIGNMENT == 0 for x in (a, b, c)):
        gemm = OneWave(form, one, workspace, stream)
    return of_library(
        gemm, handle, *operations, n, m, k, scalars.ctypes.data, address(b), kind,
        b_form[1], address(a), kind, a_form[1], scalars.ctypes.data + 4, address(c), result_kind,
        c_step, _COMPUTE_32F, _DEFAULT_ALGORITHM, reads=(a, b), writes=(c, workspace),
        keeps=scalars,
    )  # fmt: skip


def _bind(p: CudaProblem, o: CudaOperands) -> Call:
    if p.b.dtype is not F32:
        return slices.bind(p, o, multiply)
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
