"""Convolutions without a matrix of windows. As usual in machine learning, no kernel is flipped.

conv_2d_direct      y[n, o, i, j] = Σ w[o, c, p, q] · x[n, c', i·sh + p·dh − ph, j·sw + q·dw − pw]
conv_transpose_2d   its transpose in x                conv_2d_back_w   its transpose in w

c' is c plus the first channel of o's group; with as many groups as channels it is depthwise. All
three are linear in both sources, and each is a gradient of the others: one kernel serves all.
"""

from collections.abc import Iterator
from functools import partial
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
from pyggml.ops.layout.layout import reshape

Pair = tuple[int, int]
_FORWARD, _BACK_X, _BACK_W = range(3)


def conv_2d_direct(
    w: Tensor,
    x: Tensor,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Tensor:
    """x (N, C, H, W) with w (OC, C / groups, KH, KW) -> (N, OC, OH, OW), F32 (ggml's CONV_2D).

    w and x may be F16 or BF16, and are multiplied as F32.
    Raises ShapeError if the shapes do not fit or the kernel is larger than the padded x.
    """
    return CONV_2D(widen(w), widen(x), **_geometry(stride, padding, dilation, groups))


def conv_2d_dw(
    w: Tensor, x: Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1)
) -> Tensor:
    """Each channel of x (N, C, H, W) with its own w (C, 1, KH, KW) (ggml's CONV_2D_DW)."""
    return conv_2d_direct(w, x, stride, padding, dilation, groups=w.shape[0] if w.shape else 1)


def conv_transpose_2d(w: Tensor, x: Tensor, stride: int = 1, padding: Pair = (0, 0)) -> Tensor:
    """x (N, IC, H, W) with w (IC, OC, KH, KW) -> (N, OC, (H − 1)·stride + KH − 2·ph, …), F32.

    ggml's CONV_TRANSPOSE_2D, which has no padding. w and x as conv_2d_direct takes them.
    """
    expect_axes("conv_transpose_2d", "w", w, 4)
    expect_axes("conv_transpose_2d", "x", x, 4)
    sizes = zip(x.shape[2:], w.shape[2:], padding, strict=True)
    out = tuple((n - 1) * stride + k - 2 * p for n, k, p in sizes)
    of = (x.shape[0], w.shape[1], *out)
    geometry = _geometry((stride, stride), padding, (1, 1), 1)
    return CONV_TRANSPOSE_2D(widen(w), widen(x), of=of, **geometry)


def conv_transpose_1d(w: Tensor, x: Tensor, stride: int = 1) -> Tensor:
    """x (N, IC, W) with w (IC, OC, K) -> (N, OC, (W − 1)·stride + K) (ggml's CONV_TRANSPOSE_1D)."""
    expect_axes("conv_transpose_1d", "w", w, 3)
    expect_axes("conv_transpose_1d", "x", x, 3)
    y = conv_transpose_2d(with_height(w), with_height(x), stride)
    return reshape(y, (*y.shape[:2], y.shape[3]))


def with_height(x: Tensor) -> Tensor:
    """(a, b, n) as (a, b, 1, n)."""
    return reshape(x, (*x.shape[:2], 1, x.shape[2]))


_REFUSES = {
    "stride": ((0, 1), (1, -1)),
    "padding": ((-1, 0), (0, -1)),
    "dilation": ((0, 1), (1, -1)),
    "groups": (0, -1, 999),
}


def _geometry(stride: Pair, padding: Pair, dilation: Pair, groups: int) -> dict[str, Any]:
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def out_size(n: int, k: int, stride: int, padding: int, dilation: int) -> int:
    """How many positions a kernel of k elements takes along n elements."""
    return (n + 2 * padding - dilation * (k - 1) - 1) // stride + 1


def _out_shape(
    w: Shape, x: Shape, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Shape:
    if min(*stride, *dilation, groups) < 1 or min(padding) < 0:
        raise ShapeError(
            f"convolution: stride {stride}, padding {padding}, dilation {dilation}, {groups} "
            "groups; wanted 1 or more, padding 0 or more"
        )
    axes = zip(x[2:], w[2:], stride, padding, dilation, strict=True)
    sizes = tuple(out_size(*axis) for axis in axes)
    fits = x[1] == w[1] * groups and w[0] % groups == 0
    if not fits or min(*sizes, *w, *x) < 1:
        raise ShapeError(f"convolution of {x} with {w}: wanted {groups} groups of channels, w in x")
    return (x[0], w[0], *sizes)


def _expect(name: str, **tensors: Tensor) -> None:
    for what, t in tensors.items():
        expect_type(name, what, t)
        expect_axes(name, what, t, 4)


@kernel
def _line(y, x, w, q, mode):
    """Add the products of one weight, w[q], along a line: to y, x or w[q] by `mode`.

    x (n,) holds the elements that w[q] meets at the positions of y (n,).
    """
    factor, total = w[q], np.float32(0)
    if mode == 0:
        for j in range(y.size):
            y[j] += factor * x[j]
    elif mode == 1:
        for j in range(y.size):
            x[j] += factor * y[j]
    else:
        for j in range(y.size):
            total += y[j] * x[j]
        w[q] += total


@kernel
def _convolve(y, x, w, stride, padding, dilation, groups, mode):
    """One of y, x, w made of the other two; `mode` says which."""
    n_out = w.shape[0] // groups
    if mode == 0:
        y[:] = 0
    elif mode == 1:
        x[:] = 0
    else:
        w[:] = 0
    for n in range(x.shape[0]):
        for o in range(w.shape[0]):
            for c in range(w.shape[1]):
                source = x[n, o // n_out * w.shape[1] + c]
                for p in range(w.shape[2]):
                    for q in range(w.shape[3]):
                        offset = q * dilation[1] - padding[1]
                        first = max(0, -(offset // stride[1]))
                        last = min(y.shape[3], -(-(x.shape[3] - offset) // stride[1]))
                        for i in range(y.shape[2]):
                            row = i * stride[0] + p * dilation[0] - padding[0]
                            if 0 <= row < x.shape[2] and first < last:
                                seen = source[row, first * stride[1] + offset :: stride[1]]
                                _line(y[n, o, i, first:last], seen, w[o, c, p], q, mode)


def _run(mode: int, site: Site) -> Call:
    p = site.node.params
    a, b = site.src
    order = ((site.out, b, a), (b, site.out, a), (a, b, site.out))[mode]
    return Call(_convolve, *order, p["stride"], p["padding"], p["dilation"], p["groups"], mode)


def _windows(x: np.ndarray, w: Shape, stride: Pair, padding: Pair, dilation: Pair) -> np.ndarray:
    """(N, C, OH, OW, KH, KW): the window of x at each position of the kernel."""
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, w[2:], strict=True))
    seen = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(2, 3))
    return seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def _by_group(a: np.ndarray, axis: int, groups: int) -> np.ndarray:
    return a.reshape(*a.shape[:axis], groups, -1, *a.shape[axis + 1 :])


# -- conv_2d_direct -----------------------------------------------------------------------------


def _conv_spec(w: Tensor, x: Tensor, **geometry: Any) -> Spec:
    _expect("conv_2d_direct", w=w, x=x)
    return Spec(_out_shape(w.shape, x.shape, **geometry))


def _conv_ref(w: np.ndarray, x: np.ndarray, *, groups: int, **geometry: Any) -> np.ndarray:
    seen = _by_group(_windows(x, w.shape, **geometry), 1, groups)
    y = np.einsum("ngcijpq,gocpq->ngoij", seen, _by_group(w, 0, groups))
    return y.reshape(y.shape[0], -1, *y.shape[3:])


def _conv_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dw = dy * x, dx = wᵀ * dy"""
    w, x = node.src
    p = node.params
    return CONV_2D_BACK_W(dy, x, of=w.shape, **p), CONV_TRANSPOSE_2D(w, dy, of=x.shape, **p)


_Case = tuple[Shape, Shape, Pair, Pair, Pair, int]


def _drawn_case(rng: np.random.Generator) -> _Case:
    """Shapes of x and w, stride, padding, dilation, groups; w spans at most 5 of 6 elements."""
    pairs = rng.integers((1, 1, 0, 1), (4, 4, 3, 3), (2, 4)).T.tolist()
    kernel, stride, padding, dilation = ((a, b) for a, b in pairs)
    groups, own, each = rng.integers(1, 4, 3).tolist()
    x, w = (2, groups * own, 6, 7), (groups * each, own, *kernel)
    return x, w, stride, padding, dilation, groups


def _conv_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases: list[_Case] = [
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1),
        ((2, 3, 5, 6), (4, 3, 2, 3), (1, 1), (0, 0), (1, 1), 1),
        ((1, 2, 7, 9), (3, 2, 3, 2), (2, 3), (1, 2), (2, 1), 1),
        ((2, 4, 1, 11), (6, 2, 1, 4), (1, 2), (0, 3), (1, 2), 2),
        ((1, 5, 6, 4), (5, 1, 3, 3), (1, 1), (1, 1), (1, 1), 5),
    ]
    cases.append(_drawn_case(rng))
    for x, w, *geometry in cases:
        arrays = rng.standard_normal(w), rng.standard_normal(x)
        names = ("stride", "padding", "dilation", "groups")
        yield Sample(arrays, dict(zip(names, geometry, strict=True)))


CONV_2D = op(
    name="conv_2d_direct",
    ggml=GGMLOp.CONV_2D,
    spec=_conv_spec,
    ref=_conv_ref,
    grad=_conv_grad,
    samples=_conv_samples,
    refuses=_REFUSES,
)
cpu_kernel(CONV_2D, partial(_run, _FORWARD))

# -- conv_transpose_2d --------------------------------------------------------------------------


def _transpose_spec(w: Tensor, dy: Tensor, of: Shape, **geometry: Any) -> Spec:
    _expect("conv_transpose_2d", w=w, x=dy)
    expect("conv_transpose_2d", "x", dy, _out_shape(w.shape, of, **geometry))
    return Spec(of)


def _transpose_ref(w: np.ndarray, dy: np.ndarray, of: Shape, **p: Any) -> np.ndarray:
    """Each element of dy adds its multiple of the kernel to the window that it was made of."""
    (sh, sw), (ph, pw), (dh, dw) = p["stride"], p["padding"], p["dilation"]
    n_out = len(w) // p["groups"]
    padded = np.zeros((*of[:2], of[2] + 2 * ph, of[3] + 2 * pw))
    for n, o, i, j in np.ndindex(*dy.shape):
        channels = slice(o // n_out * w.shape[1], (o // n_out + 1) * w.shape[1])
        rows = slice(i * sh, i * sh + dh * (w.shape[2] - 1) + 1, dh)
        columns = slice(j * sw, j * sw + dw * (w.shape[3] - 1) + 1, dw)
        padded[n, channels, rows, columns] += dy[n, o, i, j] * w[o]
    return padded[:, :, ph : ph + of[2], pw : pw + of[3]]


def _transpose_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """dw = x * g, dx = w * g"""
    w, dy = node.src
    p = {k: v for k, v in node.params.items() if k != "of"}
    return CONV_2D_BACK_W(dy, g, of=w.shape, **p), CONV_2D(w, g, **p)


def _transpose_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _conv_samples(rng):
        w, x = s.arrays
        dy = rng.standard_normal(_out_shape(w.shape, x.shape, **s.params))
        yield Sample((w, dy), {"of": x.shape, **s.params})


CONV_TRANSPOSE_2D = op(
    name="conv_transpose_2d",
    ggml=GGMLOp.CONV_TRANSPOSE_2D,
    spec=_transpose_spec,
    ref=_transpose_ref,
    grad=_transpose_grad,
    samples=_transpose_samples,
    refuses={"of": ((9, 9, 0, 9),), **_REFUSES},
)
cpu_kernel(CONV_TRANSPOSE_2D, partial(_run, _BACK_X))

# -- conv_2d_back_w -----------------------------------------------------------------------------


def _back_w_spec(dy: Tensor, x: Tensor, of: Shape, **geometry: Any) -> Spec:
    _expect("conv_2d_back_w", dy=dy, x=x)
    expect("conv_2d_back_w", "dy", dy, _out_shape(of, x.shape, **geometry))
    return Spec(of)


def _back_w_ref(
    dy: np.ndarray, x: np.ndarray, of: Shape, *, groups: int, **geometry: Any
) -> np.ndarray:
    seen = _by_group(_windows(x, of, **geometry), 1, groups)
    return np.einsum("ngcijpq,ngoij->gocpq", seen, _by_group(dy, 1, groups)).reshape(of)


def _back_w_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """ddy = g * x, dx = gᵀ * dy"""
    dy, x = node.src
    p = {k: v for k, v in node.params.items() if k != "of"}
    return CONV_2D(g, x, **p), CONV_TRANSPOSE_2D(g, dy, of=x.shape, **p)


def _back_w_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _transpose_samples(rng):
        w, dy = s.arrays
        params = dict(s.params)
        x = rng.standard_normal(params.pop("of"))
        yield Sample((dy, x), {"of": w.shape, **params})


CONV_2D_BACK_W = op(
    name="conv_2d_back_w",
    spec=_back_w_spec,
    ref=_back_w_ref,
    grad=_back_w_grad,
    samples=_back_w_samples,
    refuses={"of": ((9, 9, 0, 9),), **_REFUSES},
)
cpu_kernel(CONV_2D_BACK_W, partial(_run, _BACK_W))
