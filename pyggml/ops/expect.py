"""Checks for shape rules: each raises an error that names what was found and what was wanted."""

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.dtypes import F32, F64, I32, DType
from pyggml.graph.tensor import Shape, Tensor


def expect(op: str, what: str, t: Tensor, shape: Shape, dtype: DType = F32) -> None:
    """ShapeError unless t has this shape and type."""
    if t.shape != shape or t.dtype is not dtype:
        hint = " (NumPy's floats are F64: a.astype(np.float32) is F32)" if t.dtype is F64 else ""
        raise ShapeError(f"{op}: {what} is {t!r}, wanted {dtype}{list(shape)}{hint}")


def expect_type(op: str, what: str, t: Tensor, dtype: DType = F32) -> None:
    """ShapeError unless t has this type."""
    expect(op, what, t, t.shape, dtype)


def expect_axes(op: str, what: str, t: Tensor, *n_axes: int) -> None:
    """ShapeError unless t has one of these numbers of axes."""
    if len(t.shape) not in n_axes:
        counts = " or ".join(map(str, n_axes))
        raise ShapeError(f"{op}: {what} is {t!r}, wanted {counts} axes")


NAN, INF = float("nan"), float("inf")
NONE_FROM_ZERO = (-1.0, NAN, INF)  # values that expect_number refuses
NONE_ABOVE_ZERO = (0.0, -1.0, NAN, INF)  # values that expect_above_zero refuses


def expect_number(op: str, what: str, value: float) -> None:
    """ShapeError unless a setting is finite and not below 0."""
    if not 0 <= value < np.inf:
        raise ShapeError(f"{op}: {what} is {value}, wanted a number from 0 on")


def expect_above_zero(op: str, what: str, value: float) -> None:
    """ShapeError unless a setting is finite and more than 0."""
    if not 0 < value < np.inf:
        raise ShapeError(f"{op}: {what} is {value}, wanted a number above 0")


def expect_gapless(op: str, what: str, t: Tensor) -> None:
    """ShapeError if t is a view with gaps: the op changes it in place."""
    if not t.is_contiguous:
        raise ShapeError(f"{op}: {what} is {t!r} with strides {t.strides}, wanted one without gaps")


def expect_attention(op: str, q: Tensor, k: Tensor, v: Tensor, span: Tensor) -> None:
    """ShapeError unless q is (T, H, D) F32, k (S, HK, D) and v (S, HK, DV) with HK | H, span (T, 2)
    I32. The caller checks the types of k and v."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}, span {span.shape}"
    fits = len(q.shape) == len(k.shape) == len(v.shape) == 3
    if not fits or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2] or not v.shape[2]:
        raise ShapeError(f"{op}: {shapes}; wanted (T, H, D), (S, HK, D), (S, HK, DV)")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or span.shape != (q.shape[0], 2):
        raise ShapeError(f"{op}: {shapes}; wanted HK dividing H, and span (T, 2)")
    types = f"q {q.dtype}, k {k.dtype}, v {v.dtype}, span {span.dtype}"
    if q.dtype is not F32 or span.dtype is not I32:
        raise ShapeError(f"{op}: {types}; wanted q in F32 and span in I32")


def check_ids(op: str, ids: np.ndarray, n_rows: int) -> None:
    """PyggmlError unless all ids are rows of n_rows. Kernels call it: ids are known at run time."""
    if ids.size and (ids.min() < 0 or ids.max() >= n_rows):
        wrong = ids[(ids < 0) | (ids >= n_rows)].reshape(-1)[0]
        raise PyggmlError(f"{op}: id {wrong} is none of the {n_rows} rows")
