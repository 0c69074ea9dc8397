"""Spans: the range of keys that each query sees.

window_span    (first, end) -> (max(first, end − window), end): a sliding window
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.dtypes import I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import cpu_kernel, rows
from pyggml.ops.expect import expect_type


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
    return np.stack([np.maximum(span[:, 0], span[:, 1] - window), span[:, 1]], axis=1)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n, window in ((1, 1), (9, 4), (33, 100), (20, int(rng.integers(1, 12)))):
        first = rng.integers(0, 5, n)
        span = np.stack([first, first + rng.integers(0, 12, n)], axis=1)
        yield Sample((span.astype(np.int32),), {"window": window})


WINDOW_SPAN = op(
    name="window_span",
    ggml=GGMLOp.CUSTOM,
    spec=_spec,
    ref=_ref,
    grad=NoGrad("the number of a key does not change smoothly"),
    samples=_samples,
    refuses={"window": (0, -1)},
    memory=Memory.FRESH,
)
cpu_kernel(WINDOW_SPAN, rows(_window_span))
