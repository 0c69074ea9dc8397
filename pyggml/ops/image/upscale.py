"""Axes made longer or shorter by interpolation, with sample points as in PyTorch's interpolate.

From n to m elements, result i lies at (i + 1/2)·n/m − 1/2 of the source; with align_corners, at
i·(n − 1)/(m − 1) on the last two axes, as in ggml. The cubic is Keys' with a = −3/4. Beyond an
end, the last element is repeated. With antialias a result is the mean of all elements less than
max(1, n/m) away, each by how near it is.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Sample
from pyggml.graph.tensor import Shape, Tensor
from pyggml.ops.image.resample import resampling_op
from pyggml.ops.image.sample_points import Axis, axis_of_indices

_MODES = ("nearest", "bilinear", "bicubic")
_A = -0.75


def upscale(
    x: Tensor,
    sizes: Sequence[int],
    mode: str = "nearest",
    align_corners: bool = False,
    antialias: bool = False,
) -> Tensor:
    """x F32 with axes of these sizes (ggml's UPSCALE, also called INTERPOLATE).

    Mode "nearest" takes floor(i·n/m) on all axes; "bilinear" and "bicubic" interpolate the last
    two. align_corners stretches the last two axes alone; antialias is for "bilinear" without it.
    Raises ShapeError for another mode or number of axes, or a size below 1.
    """
    settings = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    return UPSCALE(x, sizes=tuple(map(int, sizes)), **settings)


def _ratio(n: int, m: int, align_corners: bool) -> float:
    return (n - 1) / (m - 1) if align_corners and n > 1 and m > 1 else n / m


def _points(n: int, m: int, align_corners: bool) -> np.ndarray:
    """Where in the source the m results lie, float64."""
    half = 0.0 if align_corners else 0.5
    return (np.arange(m) + half) * _ratio(n, m, align_corners) - half


def _cubic(t: np.ndarray) -> np.ndarray:
    """The weight of an element at distance t from a point, 0 from 2 on."""
    t = np.abs(t)
    near = ((_A + 2) * t - (_A + 3)) * t * t + 1
    far = ((_A * t - 5 * _A) * t + 8 * _A) * t - 4 * _A
    return np.where(t <= 1, near, np.where(t < 2, far, 0))


def _triangles(n: int, m: int) -> Axis:
    """The elements around each of m points that an antialiased mean takes, and their shares."""
    reach, points = max(1.0, n / m), _points(n, m, False)[:, None]
    taps = np.floor(points - reach) + np.arange(1, 2 * math.ceil(reach) + 2)
    weights = np.maximum(0, 1 - np.abs(points - taps) / reach) * ((taps >= 0) & (taps < n))
    weights = weights / weights.sum(1, keepdims=True)
    return np.clip(taps, 0, n - 1).astype(np.int64), weights.astype(np.float32)


def _axis(n: int, m: int, mode: str, align_corners: bool) -> Axis:
    if mode == "nearest":
        ratio = _ratio(n, m, align_corners)
        return axis_of_indices(np.minimum((np.arange(m) * ratio + 1e-9).astype(np.int64), n - 1))
    points = _points(n, m, align_corners)[:, None]
    if mode == "bilinear":
        points = np.clip(points, 0, n - 1)
        taps = np.floor(points) + np.arange(2)
        weights = np.maximum(0, 1 - np.abs(points - taps))
    else:
        taps = np.floor(points) + np.arange(-1, 3)
        weights = _cubic(points - taps)
    return np.clip(taps, 0, n - 1).astype(np.int64), weights.astype(np.float32)


def _axes(
    shape: Shape, sizes: Shape, mode: str, align_corners: bool, antialias: bool
) -> list[Axis]:
    if mode not in _MODES:
        raise ShapeError(f"upscale: mode is {mode!r}, wanted one of {', '.join(_MODES)}")
    if len(sizes) != len(shape) or min(sizes, default=1) < 1:
        raise ShapeError(f"upscale: sizes {sizes}, wanted {len(shape)} numbers of 1 or more")
    if antialias and (mode != "bilinear" or align_corners):
        raise ShapeError("upscale: antialias wants mode bilinear without align_corners")
    pairs = list(zip(shape, sizes, strict=True))
    outer = [_axis(n, m, "nearest", False) for n, m in pairs[:-2]]
    if antialias:
        return outer + [_triangles(n, m) for n, m in pairs[-2:]]
    return outer + [_axis(n, m, mode, align_corners) for n, m in pairs[-2:]]


def _ref(
    x: np.ndarray, sizes: Shape, mode: str, align_corners: bool, antialias: bool
) -> np.ndarray:
    """One axis after the other, one element after the other."""
    for axis, m in enumerate(sizes):
        inner = axis >= x.ndim - 2
        own = ("antialias" if antialias else mode) if inner else "nearest"
        lines = np.moveaxis(x, axis, -1)
        columns = [_at(lines, i, m, own, align_corners and inner) for i in range(m)]
        x = np.moveaxis(np.stack(columns, -1), -1, axis)
    return x


def _at(lines: np.ndarray, i: int, m: int, mode: str, align_corners: bool) -> np.ndarray:
    n = lines.shape[-1]
    if mode == "nearest":
        corners = align_corners and n > 1 and m > 1
        i_source = i * (n - 1) // (m - 1) if corners else i * n // m
        return np.asarray(lines[..., i_source])
    point = _points(n, m, align_corners)[i]
    if mode == "antialias":
        near = np.maximum(0, 1 - np.abs(np.arange(n) - point) / max(1, n / m))
        return np.asarray(lines @ (near / near.sum()))
    if mode == "bilinear":
        inside = min(max(point, 0.0), n - 1.0)
        left = int(inside)
        part = inside - left
        return np.asarray((1 - part) * lines[..., left] + part * lines[..., min(left + 1, n - 1)])
    reach = range(int(np.floor(point)) - 1, int(np.floor(point)) + 3)
    terms = (_cubic(np.array(point - t)) * lines[..., min(max(t, 0), n - 1)] for t in reach)
    return np.asarray(sum(terms))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), (1, 3)), ((3, 4), (6, 9)), ((2, 1, 5, 7), (2, 2, 8, 3))]
    for shape, sizes in [*cases, ((4, 3, 5), tuple(rng.integers(1, 10, 3).tolist()))]:
        for mode in _MODES:
            for align_corners in (False, True):
                params = {"sizes": sizes, "mode": mode, "align_corners": align_corners}
                yield Sample((rng.standard_normal(shape),), {**params, "antialias": False})
        params = {"sizes": sizes, "mode": "bilinear", "align_corners": False, "antialias": True}
        yield Sample((rng.standard_normal(shape),), params)


UPSCALE = resampling_op(
    "upscale",
    GGMLOp.UPSCALE,
    _axes,
    _ref,
    _samples,
    {
        "sizes": ((0, 1), (1, -1), (1,) * 5),
        "mode": ("sideways",),
        "align_corners": (),
        "antialias": (),
    },
)
