"""What shape rules ask of their sources, and the sentence that says what was found instead."""

from __future__ import annotations

from pyggml.dtypes import F32, DType
from pyggml.errors import ShapeError
from pyggml.tensor import Shape, Tensor


def expect(op: str, what: str, t: Tensor, shape: Shape, dtype: DType = F32) -> None:
    """ShapeError unless t has this shape and type."""
    if t.shape != shape or t.dtype is not dtype:
        raise ShapeError(f"{op}: {what} is {t!r}, wanted {dtype}{list(shape)}")


def expect_type(op: str, what: str, t: Tensor, dtype: DType = F32) -> None:
    """ShapeError unless t has this type."""
    expect(op, what, t, t.shape, dtype)


def expect_axes(op: str, what: str, t: Tensor, *n_axes: int) -> None:
    """ShapeError unless t has one of these numbers of axes."""
    if len(t.shape) not in n_axes:
        wanted = " or ".join(map(str, n_axes))
        raise ShapeError(f"{op}: {what} is {t!r}, wanted {wanted} axes")


def expect_gapless(op: str, what: str, t: Tensor) -> None:
    """ShapeError if t, which the op changes in place, is a view with gaps."""
    if not t.is_contiguous:
        raise ShapeError(f"{op}: {what} is {t!r} with strides {t.strides}, wanted one without gaps")
