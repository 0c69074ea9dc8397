"""Pooling: the mean or the maximum of windows of the last one or two axes.

pool_avg   the mean of a window; as in ggml, 2-D counts padding as zeros, 1-D does not count it
pool_max   the maximum of a window, which alone gets the gradient; among equals, the first
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import check_ids, expect, expect_axes, expect_type
from pyggml.ops.image.conv import Pair, out_size
from pyggml.ops.image.resample import resampling_op
from pyggml.ops.image.sample_points import Axis, axis_of_indices
from pyggml.ops.layout.layout import reshape

_KINDS = ("avg", "max")


def pool_1d(x: Tensor, kind: str, size: int, stride: int, padding: int = 0) -> Tensor:
    """x (…, W) F32 -> (…, OW); kind is "avg" or "max" (ggml's POOL_1D)."""
    if not x.shape:
        raise ShapeError(f"pool_1d: x is {x!r}, wanted one axis or more")
    flat = reshape(x, (1, x.n_elements // max(x.shape[-1], 1), 1, x.shape[-1]))
    y = _pool(flat, kind, (1, size), (1, stride), (0, padding), False)
    return reshape(y, (*x.shape[:-1], y.shape[-1]))


def pool_2d(x: Tensor, kind: str, size: Pair, stride: Pair, padding: Pair = (0, 0)) -> Tensor:
    """x (N, C, H, W) F32 -> (N, C, OH, OW); kind is "avg" or "max" (ggml's POOL_2D).

    Raises ShapeError for another kind, a window that does not fit, or padding of a window or more.
    """
    return _pool(x, kind, size, stride, padding, True)


def _pool(x: Tensor, kind: str, size: Pair, stride: Pair, padding: Pair, whole: bool) -> Tensor:
    if kind not in _KINDS:
        raise ShapeError(f"pool: kind is {kind!r}, wanted avg or max")
    window = {"size": size, "stride": stride, "padding": padding}
    return POOL_AVG(x, **window, whole=whole) if kind == "avg" else POOL_MAX(x, **window)


_REFUSES = {
    "size": ((0, 1), (1, -1), (99, 99)),
    "stride": ((0, 1), (1, -1)),
    "padding": ((-1, 0), (99, 99)),
}


def _sizes(x: Shape, size: Pair, stride: Pair, padding: Pair) -> Pair:
    """(OH, OW)."""
    valid = len(x) == 4 and min(*x[-2:], *size, *stride) > 0
    valid = valid and all(0 <= p < k for p, k in zip(padding, size, strict=True))
    axes = zip(x[-2:], size, stride, padding, strict=True)
    out = [out_size(*axis, dilation=1) for axis in axes] if valid else [0]
    if min(out) < 1:
        raise ShapeError(
            f"pool: windows {size}, stride {stride}, padding {padding} do not fit into {list(x)}"
        )
    return out[0], out[1]


def _window(i: int, n: int, k: int, stride: int, padding: int) -> range:
    """The indices of the elements in window i."""
    start = i * stride - padding
    return range(max(start, 0), min(start + k, n))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    drawn = rng.integers(1, 5, (2, 2)).tolist()
    for shape, size, stride, padding in [
        *(((1, 1, 1, 1), (1, 1), (1, 1), (0, 0)), ((2, 3, 6, 8), (2, 2), (2, 2), (0, 0))),
        *(((1, 2, 5, 7), (3, 2), (1, 3), (1, 1)), ((1, 4, 1, 9), (1, 4), (1, 2), (0, 2))),
        ((2, 1, 6, 7), tuple(drawn[0]), tuple(drawn[1]), tuple(rng.integers(0, drawn[0]).tolist())),
    ]:
        x = rng.permutation(1.0 + np.arange(np.prod(shape)))  # no two are equal
        yield Sample((x.reshape(shape),), {"size": size, "stride": stride, "padding": padding})


# -- pool_avg -----------------------------------------------------------------------------------


def _avg_axis(n: int, m: int, k: int, stride: int, padding: int, whole: bool) -> Axis:
    indices = np.arange(m)[:, None] * stride - padding + np.arange(k)
    inside = (indices >= 0) & (indices < n)
    share = inside / (k if whole else np.maximum(inside.sum(axis=1, keepdims=True), 1))
    return np.clip(indices, 0, n - 1), share.astype(np.float32)


def _avg_axes(shape: Shape, size: Pair, stride: Pair, padding: Pair, whole: bool) -> list[Axis]:
    out = _sizes(shape, size, stride, padding)
    axes = zip(shape[2:], out, size, stride, padding, strict=True)
    windows = [_avg_axis(*axis, whole) for axis in axes]
    return [*(axis_of_indices(np.arange(n)) for n in shape[:2]), *windows]


def _avg_ref(x: np.ndarray, size: Pair, stride: Pair, padding: Pair, whole: bool) -> np.ndarray:
    y = np.zeros((*x.shape[:2], *_sizes(x.shape, size, stride, padding)))
    for i, j in np.ndindex(*y.shape[2:]):
        rows = _window(i, x.shape[2], size[0], stride[0], padding[0])
        columns = _window(j, x.shape[3], size[1], stride[1], padding[1])
        seen = x[:, :, rows.start : rows.stop, columns.start : columns.stop]
        count = size[0] * size[1] if whole else max(len(rows) * len(columns), 1)
        y[:, :, i, j] = seen.sum(axis=(2, 3)) / count
    return y


def _avg_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        for whole in (False, True):
            yield Sample(s.arrays, {**s.params, "whole": whole})


POOL_AVG = resampling_op(
    "pool_avg", GGMLOp.POOL_2D, _avg_axes, _avg_ref, _avg_samples, {**_REFUSES, "whole": ()}
)

# -- pool_max -----------------------------------------------------------------------------------


def _max_spec(x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Spec:
    expect_type("pool_max", "x", x)
    expect_axes("pool_max", "x", x, 4)
    return Spec((*x.shape[:2], *_sizes(x.shape, size, stride, padding)))


def _max_saved(x: Tensor, **window: Pair) -> tuple[Spec, ...]:
    """The index of each maximum in its plane."""
    return (Spec((*x.shape[:2], *_sizes(x.shape, **window)), I32),)


@kernel
def _pool_max(y, where, x, size, stride, padding):
    """y, where (planes, OH, OW); x (planes, H, W)."""
    for plane in range(x.shape[0]):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                top, index = np.float32(-np.inf), -1
                a0, b0 = i * stride[0] - padding[0], j * stride[1] - padding[1]
                for a in range(max(a0, 0), min(a0 + size[0], x.shape[1])):
                    for b in range(max(b0, 0), min(b0 + size[1], x.shape[2])):
                        if index < 0 or x[plane, a, b] > top:
                            top, index = x[plane, a, b], a * x.shape[2] + b
                y[plane, i, j] = top
                where[plane, i, j] = index


def _planes(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1, *a.shape[2:])


def _max_run(site: Site) -> Call:
    p = site.node.params
    arrays = (_planes(a) for a in (site.out, site.saved[0], site.src[0]))
    return Call(_pool_max, *arrays, p["size"], p["stride"], p["padding"])


def _max_ref(x: np.ndarray, size: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    y = np.zeros((*x.shape[:2], *_sizes(x.shape, size, stride, padding)))
    for i, j in np.ndindex(*y.shape[2:]):
        rows = _window(i, x.shape[2], size[0], stride[0], padding[0])
        columns = _window(j, x.shape[3], size[1], stride[1], padding[1])
        y[:, :, i, j] = x[:, :, rows.start : rows.stop, columns.start : columns.stop].max((2, 3))
    return y


def _max_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = Σ of dy over the windows whose maximum it was"""
    return (POOL_MAX_BACK(dy, node.saved[0], of=node.src[0].shape),)


POOL_MAX = op(
    name="pool_max",
    ggml=GGMLOp.POOL_2D,
    spec=_max_spec,
    ref=_max_ref,
    grad=_max_grad,
    samples=_samples,
    refuses=_REFUSES,
    saved=_max_saved,
)
cpu_kernel(POOL_MAX, _max_run)


def _back_spec(dy: Tensor, where: Tensor, of: Shape) -> Spec:
    expect_type("pool_max_back", "dy", dy)
    expect_axes("pool_max_back", "dy", dy, 4)
    expect("pool_max_back", "where", where, dy.shape, I32)
    if len(of) != 4 or of[:2] != dy.shape[:2]:
        raise ShapeError(f"pool_max_back: {dy!r} is no pool of {list(of)}")
    return Spec(of)


@kernel
def _pool_max_back(dx, dy, where):
    """dx (planes, H · W); dy, where (planes, OH · OW)."""
    dx[:] = 0
    for plane in range(dx.shape[0]):
        for i in range(dy.shape[1]):
            dx[plane, where[plane, i]] += dy[plane, i]


def _back(dx: np.ndarray, dy: np.ndarray, where: np.ndarray) -> None:
    check_ids("pool_max_back", where, dx.shape[1])
    _pool_max_back(dx, dy, where)


def _back_run(site: Site) -> Call:
    n_planes = site.out.shape[0] * site.out.shape[1]
    return Call(_back, *(a.reshape(n_planes, -1) for a in (site.out, *site.src)))


def _back_ref(dy: np.ndarray, where: np.ndarray, of: Shape) -> np.ndarray:
    n_planes = of[0] * of[1]
    dx = np.zeros((n_planes, of[2] * of[3]))
    indices = (np.arange(n_planes)[:, None], where.reshape(n_planes, -1))
    np.add.at(dx, indices, dy.reshape(n_planes, -1))
    return dx.reshape(of)


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        of = s.arrays[0].shape
        dy = rng.standard_normal((*of[:2], *_sizes(of, **s.params)))
        where = rng.integers(0, of[2] * of[3], dy.shape, np.int32)
        params: dict[str, Any] = {"of": of}
        yield Sample((dy, where), params)


POOL_MAX_BACK = op(
    name="pool_max_back",
    ggml=GGMLOp.POOL_2D_BACK,
    spec=_back_spec,
    ref=_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_back_samples,
    refuses={"of": ((9, 9, 9, 9), (9999,))},
)
cpu_kernel(POOL_MAX_BACK, _back_run)
