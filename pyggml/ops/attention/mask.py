"""Which keys a query sees: causal masks of a matrix, and spans, the range of keys of each query.

Element (row, column) of each matrix is kept where column <= n_past + row.

diag_mask_inf    -inf elsewhere, before a softmax
diag_mask_zero   0 elsewhere, which is also the gradient of both
window_span      (first, end) -> (max(first, end − window), end): a sliding window
chunk_span       (first, end) -> (max(first, end − 1 − position mod size), end): a chunk
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, as_rows, cpu_kernel, flat, rows
from pyggml.ops.expect import expect_type


def diag_mask_inf(x: Tensor, n_past: int = 0) -> Tensor:
    """x (..., n_rows, n_columns) F32 with -inf where column > n_past + row (DIAG_MASK_INF)."""
    return DIAG_MASK_INF(x, n_past=n_past)


def diag_mask_zero(x: Tensor, n_past: int = 0) -> Tensor:
    """x (..., n_rows, n_columns) F32 with 0 where column > n_past + row (DIAG_MASK_ZERO)."""
    return DIAG_MASK_ZERO(x, n_past=n_past)


@kernel
def _diag_mask(out, x, n_rows, n_past, fill):
    for i in range(x.shape[0]):
        kept = min(n_past + i % n_rows + 1, x.shape[1])
        for c in range(kept):
            out[i, c] = x[i, c]
        for c in range(kept, x.shape[1]):
            out[i, c] = fill


def _mask_run(fill: float, site: Site) -> Call:
    (x,) = site.src
    n_past = site.node.params["n_past"]
    return Call(_diag_mask, as_rows(site.out), as_rows(x), x.shape[-2], n_past, np.float32(fill))


def _mask_spec(x: Tensor, n_past: int) -> Spec:
    expect_type("diag_mask", "x", x)
    if len(x.shape) < 2 or n_past < 0:
        raise ShapeError(f"diag_mask: x is {x!r}, n_past {n_past}, wanted matrices, n_past >= 0")
    return Spec(x.shape)


def _mask_future(x: np.ndarray, n_past: int, fill: float) -> np.ndarray:
    n_rows, n_columns = x.shape[-2:]
    return np.where(np.tri(n_rows, n_columns, n_past, dtype=bool), x, fill)


def _mask_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy, 0 where it was masked"""
    return (diag_mask_zero(dy, node.params["n_past"]),)


def _mask_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), 0), ((4, 4), 0), ((3, 8), 2), ((2, 2, 5, 3), 1)]
    for shape, n_past in [*cases, ((3, 4, 6), int(rng.integers(0, 9)))]:
        yield Sample((rng.standard_normal(shape),), {"n_past": n_past})


DIAG_MASK_INF = op(
    name="diag_mask_inf",
    ggml=GGMLOp.DIAG_MASK_INF,
    spec=_mask_spec,
    ref=lambda x, n_past: _mask_future(x, n_past, -np.inf),
    grad=_mask_grad,
    samples=_mask_samples,
    refuses={"n_past": (-1,)},
    memory=Memory.INPLACE,
)
cpu_kernel(DIAG_MASK_INF, partial(_mask_run, -np.inf))
DIAG_MASK_ZERO = op(
    name="diag_mask_zero",
    ggml=GGMLOp.DIAG_MASK_ZERO,
    spec=_mask_spec,
    ref=lambda x, n_past: _mask_future(x, n_past, 0.0),
    grad=_mask_grad,
    samples=_mask_samples,
    refuses={"n_past": (-1,)},
    memory=Memory.INPLACE,
)
cpu_kernel(DIAG_MASK_ZERO, partial(_mask_run, 0.0))

# -- window_span ----------------------------------------------------------------------------------


def window_span(span: Tensor, window: int) -> Tensor:
    """span (T, 2) I32 of flash_attn_ext, narrowed to the last `window` keys of each query.

    ggml has no such op: llama.cpp writes the window into a mask matrix. Raises ShapeError for
    another shape or a window below 1.
    """
    return WINDOW_SPAN(span, window=window)


def _spec(span: Tensor, window: int) -> Spec:
    expect_type("window_span", "span", span, I32)
    if len(span.shape) != 2 or span.shape[1] != 2 or window < 1:
        raise ShapeError(f"window_span: {span!r}, window {window}; wanted (T, 2) and at least 1")
    return Spec(span.shape, I32)


@kernel
def _window_span(out, span, window):
    for t in range(span.shape[0]):
        out[t, 0] = max(span[t, 0], span[t, 1] - window)
        out[t, 1] = span[t, 1]


def _ref(span: np.ndarray, window: int) -> np.ndarray:
    first, end = span.astype(np.int64).T
    return np.stack([np.maximum(first, end - window), end], axis=1)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n, window in ((1, 1), (9, 4), (33, 100), (20, int(rng.integers(1, 12)))):
        first = rng.integers(0, 5, n)
        span = np.stack([first, first + rng.integers(0, 12, n)], axis=1)
        yield Sample((span.astype(np.int32),), {"window": window})


WINDOW_SPAN = op(
    name="window_span",
    spec=_spec,
    ref=_ref,
    grad=NoGrad("the number of a key does not change smoothly"),
    samples=_samples,
    refuses={"window": (0, -1)},
)
cpu_kernel(WINDOW_SPAN, rows(_window_span))

# -- chunk_span -----------------------------------------------------------------------------------


def chunk_span(span: Tensor, positions: Tensor, size: int) -> Tensor:
    """span (T, 2) I32 of flash_attn_ext, narrowed to the keys of each query's chunk of `size`.

    Chunks begin at the positions 0, size, 2 · size …; positions (T,) I32 are those of the queries,
    each the last key that it sees. ggml has no such op: llama.cpp writes the chunks into a mask
    matrix. Raises ShapeError for another shape or a size below 1. The kernel raises PyggmlError for
    a position below 0.
    """
    return CHUNK_SPAN(span, positions, size=size)


def _chunk_spec(span: Tensor, positions: Tensor, size: int) -> Spec:
    expect_type("chunk_span", "span", span, I32)
    expect_type("chunk_span", "positions", positions, I32)
    if span.shape != (*positions.shape, 2) or len(span.shape) != 2 or size < 1:
        raise ShapeError(
            f"chunk_span: {span!r}, {positions!r}, size {size}; wanted (T, 2), (T,), at least 1"
        )
    return Spec(span.shape, I32)


@kernel
def _chunk_span(out, span, positions, size):
    for t in range(positions.size):
        out[2 * t] = max(span[2 * t], span[2 * t + 1] - 1 - positions[t] % size)
        out[2 * t + 1] = span[2 * t + 1]


def _check_then_chunk(out: np.ndarray, span: np.ndarray, positions: np.ndarray, size: int) -> None:
    if positions.size and positions.min() < 0:
        raise PyggmlError(f"chunk_span: position {positions.min()}, wanted 0 or more")
    _chunk_span(out, span, positions, size)


def _chunk_ref(span: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    first, end = span.astype(np.int64).T
    return np.stack([np.maximum(first, end - 1 - positions % size), end], axis=1)


def _chunk_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n, size in ((1, 1), (9, 4), (33, 100), (20, int(rng.integers(1, 12)))):
        first, positions = rng.integers(0, 5, n), np.arange(n)
        span = np.stack([first, first + positions + 1], axis=1).astype(np.int32)
        yield Sample((span, positions.astype(np.int32)), {"size": size})


CHUNK_SPAN = op(
    name="chunk_span",
    spec=_chunk_spec,
    ref=_chunk_ref,
    grad=NoGrad("the number of a key does not change smoothly"),
    samples=_chunk_samples,
    refuses={"size": (0, -1)},
)
cpu_kernel(CHUNK_SPAN, flat(_check_then_chunk))
