"""Convolution as a product: the window at each position of the kernel becomes a row.

im2col        cols[n, i, j, (c, p, q)] = x[n, c, i·sh + p·dh − ph, j·sw + q·dw − pw], 0 outside x
im2col_back   its transpose: it adds each row to its window (1-D: ggml's COL2IM_1D)
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Sample, Spec, op, widen
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import expect, expect_axes, expect_type
from pyggml.ops.image.conv import Pair, out_size, with_height
from pyggml.ops.layout.layout import cont, reshape, transpose
from pyggml.ops.product.matmul import mul_mat


def im2col(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Tensor:
    """x (N, C, H, W) F32, F16 or BF16 -> (N, OH, OW, C · KH · KW) F32 (ggml's IM2COL).

    Raises ShapeError if the kernel is larger than the padded x.
    """
    return IM2COL(widen(x), size=kernel_size, stride=stride, padding=padding, dilation=dilation)


def conv_2d(
    w: Tensor, x: Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1)
) -> Tensor:
    """x (N, C, H, W) with w (OC, C, KH, KW) -> (N, OC, OH, OW), F32, by im2col and mul_mat.

    w is of any type whose blocks divide C·KH·KW; ggml also rounds the windows to a w of F16.
    ggml_conv_2d; conv_2d_direct needs no memory for rows. Raises ShapeError if the shapes do not
    fit.
    """
    expect_axes("conv_2d", "w", w, 4)
    expect_axes("conv_2d", "x", x, 4)
    if w.shape[1] != x.shape[1]:
        raise ShapeError(f"conv_2d: w is {w!r}, wanted the channels of {x!r}")
    size = (w.shape[2], w.shape[3])
    cols = im2col(x, size, stride, padding, dilation)
    n, height, width, depth = cols.shape
    y = mul_mat(reshape(w, (w.shape[0], depth)), reshape(cols, (n, height * width, depth)))
    return reshape(cont(transpose(y)), (n, w.shape[0], height, width))


def col2im_1d(cols: Tensor, n_channels: int, stride: int = 1, padding: int = 0) -> Tensor:
    """cols (T, n_channels · K) F32 -> (n_channels, (T − 1)·stride + K − 2·padding), F32: column t
    is added to the K elements from t·stride on, then `padding` are cut off both ends (COL2IM_1D).

    Raises ShapeError if a column holds no whole number of windows.
    """
    expect_axes("col2im_1d", "cols", cols, 2)
    size = cols.shape[1] // max(n_channels, 1)
    if n_channels < 1 or size * n_channels != cols.shape[1]:
        raise ShapeError(f"col2im_1d: cols is {cols!r}, wanted columns for {n_channels} channels")
    n = (cols.shape[0] - 1) * stride + size - 2 * padding
    rows = reshape(widen(cols), (1, 1, *cols.shape))
    windows = {"size": (1, size), "stride": (1, stride), "padding": (0, padding)}
    y = IM2COL_BACK(rows, of=(1, n_channels, 1, n), **windows, dilation=(1, 1))
    return reshape(y, (n_channels, n))


def conv_1d(w: Tensor, x: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1) -> Tensor:
    """x (N, C, W) with w (OC, C, K) -> (N, OC, OW), F32 (ggml_conv_1d)."""
    expect_axes("conv_1d", "w", w, 3)
    expect_axes("conv_1d", "x", x, 3)
    y = conv_2d(with_height(w), with_height(x), (1, stride), (0, padding), (1, dilation))
    return reshape(y, (*y.shape[:2], y.shape[3]))


_REFUSES = {
    "size": ((0, 1), (1, -1), (99, 99)),
    "stride": ((0, 1), (1, -1)),
    "padding": ((-1, 0), (0, -1)),
    "dilation": ((0, 1), (1, -1)),
}


def _shape(of: Shape, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Shape:
    if min(*size, *stride, *dilation) < 1 or min(padding) < 0:
        raise ShapeError(
            f"im2col: kernel {size}, stride {stride}, padding {padding}, dilation {dilation}; "
            "wanted 1 or more, padding 0 or more"
        )
    out = tuple(map(out_size, of[2:], size, stride, padding, dilation))
    if min(*out, *of) < 1:
        raise ShapeError(f"im2col: a kernel of {size} does not fit into {list(of)}")
    return (of[0], *out, of[1] * prod(size))


@kernel
def _im2col(cols, x, size, stride, padding, dilation, transposed):
    """cols (N, OH, OW, C · KH · KW) = windows of x (N, C, H, W); transposed, x += cols."""
    for n in range(cols.shape[0]):
        for i in range(cols.shape[1]):
            for j in range(cols.shape[2]):
                row = cols[n, i, j]
                for k in range(row.size):
                    c, p, q = k // (size[0] * size[1]), k // size[1] % size[0], k % size[1]
                    a = i * stride[0] + p * dilation[0] - padding[0]
                    b = j * stride[1] + q * dilation[1] - padding[1]
                    inside = 0 <= a < x.shape[2] and 0 <= b < x.shape[3]
                    if transposed and inside:
                        x[n, c, a, b] += row[k]
                    elif not transposed:
                        row[k] = x[n, c, a, b] if inside else np.float32(0)


def _windows_of(params: Any) -> tuple[Pair, Pair, Pair, Pair]:
    return params["size"], params["stride"], params["padding"], params["dilation"]


def _spec(x: Tensor, **windows: Pair) -> Spec:
    expect_type("im2col", "x", x)
    expect_axes("im2col", "x", x, 4)
    return Spec(_shape(x.shape, **windows))


def _run(site: Site) -> Call:
    return Call(_im2col, site.out, site.src[0], *_windows_of(site.node.params), False)


def _ref(x: np.ndarray, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> np.ndarray:
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, size, strict=True))
    seen = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(2, 3))
    seen = seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    n, _, height, width, *_ = seen.shape
    return seen.transpose(0, 2, 3, 1, 4, 5).reshape(n, height, width, -1)


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = Σ over the windows of dy that hold each element"""
    return (IM2COL_BACK(dy, of=node.src[0].shape, **node.params),)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    drawn = rng.integers((1, 1, 0, 1), (4, 4, 3, 3), (2, 4)).T.tolist()
    for x, size, stride, padding, dilation in (
        ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
        ((2, 3, 5, 6), (2, 3), (1, 1), (0, 0), (1, 1)),
        ((1, 2, 7, 9), (3, 2), (2, 3), (1, 2), (2, 1)),
        ((2, 2, 6, 7), *map(tuple, drawn)),
    ):
        windows = {"size": size, "stride": stride, "padding": padding, "dilation": dilation}
        yield Sample((rng.standard_normal(x),), windows)


IM2COL = op(
    name="im2col",
    ggml=GGMLOp.IM2COL,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
    refuses=_REFUSES,
)
cpu_kernel(IM2COL, _run)


def _back_spec(cols: Tensor, of: Shape, **windows: Pair) -> Spec:
    expect("im2col_back", "cols", cols, _shape(of, **windows))
    return Spec(of)


def _back(
    x: np.ndarray, cols: np.ndarray, size: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> None:
    x.fill(0)
    _im2col(cols, x, size, stride, padding, dilation, True)


def _back_run(site: Site) -> Call:
    return Call(_back, site.out, site.src[0], *_windows_of(site.node.params))


def _back_ref(cols: np.ndarray, of: Shape, **windows: Pair) -> np.ndarray:
    """Where elements of x go is found by running im2col on their numbers, counted from 1."""
    went = _ref(np.arange(1.0, prod(of) + 1).reshape(of), **windows)
    sums = np.bincount(went.astype(int).reshape(-1), cols.reshape(-1), prod(of) + 1)
    return np.asarray(sums[1:].reshape(of))


def _back_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """ddy = the windows of g"""
    return (IM2COL(g, **{k: v for k, v in node.params.items() if k != "of"}),)


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        of = s.arrays[0].shape
        cols = rng.standard_normal(_shape(of, **s.params))
        yield Sample((cols,), {"of": of, **s.params})


IM2COL_BACK = op(
    name="im2col_back",
    ggml=GGMLOp.IM2COL_BACK,
    spec=_back_spec,
    ref=_back_ref,
    grad=_back_grad,
    samples=_back_samples,
    refuses={"of": ((9, 9, 0, 9),), **_REFUSES},
)
cpu_kernel(IM2COL_BACK, _back_run)
