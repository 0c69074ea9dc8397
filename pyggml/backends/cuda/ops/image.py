"""Ops of images: see pyggml/ops/image. A thread has a number of the result."""

import math
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.axes import sizes, steps_of
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import per_element, per_result
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import MAX_AXES, Shape
from pyggml.ops.image.sample_points import AXES, Axis, axis_of_indices, transposed_axis

# -- convolutions and their windows ---------------------------------------------------------------


@device
def _four(i, shape):
    """The four indices of element i."""
    j = i // shape[3]
    k = j // shape[2]
    return k // shape[1], k % shape[1], j % shape[2], i % shape[3]


@device
def _at(a, b, c, d, shape):
    return ((a * shape[1] + b) * shape[2] + c) * shape[3] + d


@device
def _place(i, p, axis, g):
    """Which element of x weight p meets at position i, along an axis; it may lie outside."""
    return i * g[0][axis] + p * g[2][axis] - g[1][axis]


@device
def _position(a, p, axis, g, n):
    """At which of n positions weight p meets element a of x; -1 at none."""
    far = a + g[1][axis] - p * g[2][axis]
    i = far // g[0][axis]
    return i if far >= 0 and i * g[0][axis] == far and i < n else -1


@kernel
def _conv(y, w, x, of_y, of_w, of_x, g, groups):
    """y[n, o, i, j] = Σ w[o, c, p, q] · x[n, c', …]."""
    each = of_w[0] // groups
    for e in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        n, o, i, j = _four(e, of_y)
        total = ZERO
        for c in range(of_w[1]):
            channel = o // each * of_w[1] + c
            for p in range(of_w[2]):
                a = _place(i, p, 0, g)
                for q in range(of_w[3]):
                    b = _place(j, q, 1, g)
                    if 0 <= a < of_x[2] and 0 <= b < of_x[3]:
                        total += w[_at(o, c, p, q, of_w)] * x[_at(n, channel, a, b, of_x)]
        y[e] = total


@kernel
def _conv_back_x(x, w, y, of_y, of_w, of_x, g, groups):
    """x[n, c', a, b] = Σ w[o, c, p, q] · y[n, o, i, j] over the windows that hold it."""
    each = of_w[0] // groups
    for e in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n, channel, a, b = _four(e, of_x)
        group, c = channel // of_w[1], channel % of_w[1]
        total = ZERO
        for o in range(group * each, (group + 1) * each):
            for p in range(of_w[2]):
                i = _position(a, p, 0, g, of_y[2])
                for q in range(of_w[3]):
                    j = _position(b, q, 1, g, of_y[3])
                    if i >= 0 and j >= 0:
                        total += w[_at(o, c, p, q, of_w)] * y[_at(n, o, i, j, of_y)]
        x[e] = total


@kernel
def _conv_back_w(w, y, x, of_y, of_w, of_x, g, groups):
    """w[o, c, p, q] = Σ y[n, o, i, j] · x[n, c', …]."""
    each = of_w[0] // groups
    for e in range(cuda.grid(1), w.size, cuda.gridsize(1)):
        o, c, p, q = _four(e, of_w)
        channel, total = o // each * of_w[1] + c, ZERO
        for n in range(of_x[0]):
            for i in range(of_y[2]):
                a = _place(i, p, 0, g)
                for j in range(of_y[3]):
                    b = _place(j, q, 1, g)
                    if 0 <= a < of_x[2] and 0 <= b < of_x[3]:
                        total += y[_at(n, o, i, j, of_y)] * x[_at(n, channel, a, b, of_x)]
        w[e] = total


@kernel
def _im2col(cols, x, of_cols, size, of_x, g):
    """cols[n, i, j, (c, p, q)] = the element of x at position (i, j) of the kernel's (p, q)."""
    for e in range(cuda.grid(1), cols.size, cuda.gridsize(1)):
        n, i, j, k = _four(e, of_cols)
        a = _place(i, k // size[1] % size[0], 0, g)
        b = _place(j, k % size[1], 1, g)
        inside = 0 <= a < of_x[2] and 0 <= b < of_x[3]
        cols[e] = x[_at(n, k // (size[0] * size[1]), a, b, of_x)] if inside else ZERO


@kernel
def _im2col_back(x, cols, of_cols, size, of_x, g):
    """x[n, c, a, b] = Σ of the windows that hold it."""
    for e in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n, c, a, b = _four(e, of_x)
        total = ZERO
        for p in range(size[0]):
            i = _position(a, p, 0, g, of_cols[1])
            for q in range(size[1]):
                j = _position(b, q, 1, g, of_cols[2])
                if i >= 0 and j >= 0:
                    total += cols[_at(n, i, j, (c * size[0] + p) * size[1] + q, of_cols)]
        x[e] = total


def _geometry(site: CudaSite) -> tuple[Shape, Shape, Shape]:
    """(stride, padding, dilation), each by axis."""
    p = site.node.params
    return tuple(p["stride"]), tuple(p["padding"]), tuple(p["dilation"])


def _bind_conv(run: Any, site: CudaSite, y: int, w: int, x: int) -> Call:
    """y, w, x: which of (the result, the two sources) each is."""
    tensors = (site.node, *site.node.src)
    return per_result(
        run, site, tensors[y].shape, tensors[w].shape, tensors[x].shape,
        _geometry(site), site.node.params["groups"],
    )  # fmt: skip


def _windows(run: Any, site: CudaSite, is_back: bool) -> Call:
    (x,), cols = site.node.src, site.node
    if is_back:
        x, cols = cols, x
    size = tuple(site.node.params["size"])
    return per_result(run, site, cols.shape, size, x.shape, _geometry(site))


declare("conv_2d_direct", partial(_bind_conv, _conv, y=0, w=1, x=2))
declare("conv_transpose_2d", partial(_bind_conv, _conv_back_x, y=2, w=1, x=0))
declare("conv_2d_back_w", partial(_bind_conv, _conv_back_w, y=1, w=0, x=2))
declare("im2col", partial(_windows, _im2col, is_back=False))
declare("im2col_back", partial(_windows, _im2col_back, is_back=True))


# -- pools of maxima and their gradient -----------------------------------------------------------


_MINUS_INF = np.float32(-math.inf)


@kernel
def _pool_max(y, where, x, size, stride, padding, of_y, of_x):
    """y, where (planes, OH, OW), x (planes, H, W); `where` takes the index in its plane of x."""
    for e in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        plane, i, j = e // (of_y[0] * of_y[1]), e // of_y[1] % of_y[0], e % of_y[1]
        top, index, start = _MINUS_INF, -1, plane * of_x[0] * of_x[1]
        a0, b0 = i * stride[0] - padding[0], j * stride[1] - padding[1]
        for a in range(max(a0, 0), min(a0 + size[0], of_x[0])):
            for b in range(max(b0, 0), min(b0 + size[1], of_x[1])):
                seen = x[start + a * of_x[1] + b]
                if index < 0 or seen > top:
                    top, index = seen, a * of_x[1] + b
        y[e], where[e] = top, index


@kernel
def _pool_max_back(dx, dy, where, n, n_windows, cell, fault):
    """A thread has a plane, and adds in the order of its windows: each run gives the same."""
    for plane in range(cuda.grid(1), dx.size // n, cuda.gridsize(1)):
        for i in range(n):
            dx[plane * n + i] = ZERO
        for i in range(plane * n_windows, (plane + 1) * n_windows):
            if 0 <= where[i] < n:
                dx[plane * n + where[i]] += dy[i]
            else:
                cuda.atomic.max(cell, 0, fault)


def _bind_pool(site: CudaSite) -> Call:
    p, (x,) = site.node.params, site.node.src
    return per_element(
        _pool_max, site.out.size, site.stream, site.out, site.saved[0], site.src[0],
        tuple(p["size"]), tuple(p["stride"]), tuple(p["padding"]), site.node.shape[2:], x.shape[2:],
    )  # fmt: skip


def _bind_back(site: CudaSite) -> Call:
    (*batch, height, width), dy = site.node.shape, site.node.src[0]
    n, n_planes = height * width, batch[0] * batch[1]
    fault = site.faults.number(f"pool_max_back: an index is not one of {n} elements")
    return per_element(
        _pool_max_back, n_planes, site.stream, site.out, *site.src,
        n, dy.n_elements // n_planes, site.faults.cell, fault,
    )  # fmt: skip


declare("pool_max", _bind_pool)
declare("pool_max_back", _bind_back)


# -- padding, rolling, resizing and mean pools ----------------------------------------------------


@kernel
def _resample(out, x, index, weight, firsts, taps, shape, steps):
    """out_i = Σ x · its four weights, over all combinations of taps.

    The tables of the four axes lie one after the other, from `firsts` on, with so many `taps`.
    """
    n_taps = taps[0] * taps[1] * taps[2] * taps[3]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        total = ZERO
        for tap in range(n_taps):
            factor, at, rest_of_i, rest_of_tap = ONE, 0, i, tap
            for j in range(4):
                axis = 3 - j
                k = firsts[axis] + rest_of_i % shape[axis] * taps[axis] + rest_of_tap % taps[axis]
                factor *= weight[k]
                at += index[k] * steps[axis]
                rest_of_i //= shape[axis]
                rest_of_tap //= taps[axis]
            if factor != ZERO:
                total += factor * x[at]
        out[i] = total


def _bind(site: CudaSite, axes: list[Axis], source: Shape) -> Call:
    axes = [axis_of_indices(np.zeros(1, np.int64))] * (MAX_AXES - len(axes)) + axes
    indices, weights = (
        [table.reshape(-1) for table in tables] for tables in zip(*axes, strict=True)
    )
    taps = tuple(np.int64(index.shape[1]) for index, _ in axes)
    firsts = tuple(np.cumsum([0, *(len(i) for i in indices[:-1])]))
    x_steps = steps_of(tuple(prod(source[i + 1 :]) for i in range(len(source))))
    return per_result(
        _resample, site, site.constant(np.concatenate(indices)),
        site.constant(np.concatenate(weights)), firsts, taps, sizes(site.node.shape), x_steps,
    )  # fmt: skip


def _forward(name: str, site: CudaSite) -> Call:
    (x,) = site.node.src
    return _bind(site, AXES[name](x.shape, **site.node.params), x.shape)


def _backward(name: str, site: CudaSite) -> Call:
    params: dict[str, Any] = dict(site.node.params)
    of = params.pop("of")
    axes = zip(AXES[name](of, **params), of, strict=True)
    return _bind(site, [transposed_axis(axis, n) for axis, n in axes], site.node.src[0].shape)


for _name in ("pad", "pad_reflect_1d", "roll", "upscale", "pool_avg"):
    declare(_name, partial(_forward, _name))
    declare(f"{_name}_back", partial(_backward, _name))


# -- number ranges, and sines and cosines of time steps -------------------------------------------


@kernel
def _arange(out, start, step):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = start + step * i


def _bind_arange(site: CudaSite) -> Call:
    p = site.node.params
    return per_result(_arange, site, np.float64(p["start"]), np.float64(p["step"]))


@kernel
def _timestep(out, t, frequencies, dim):
    """out (n, dim): cosines, sines, and 0 at the end of an odd dim; angles in float64."""
    half = dim // 2
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        j, value = i % dim, ZERO
        if j < 2 * half:
            angle = np.float64(t[i // dim]) * frequencies[j % half]
            value = np.float32(math.cos(angle) if j < half else math.sin(angle))
        out[i] = value


def _bind_timestep(site: CudaSite) -> Call:
    dim, max_period = site.node.params["dim"], float(site.node.params["max_period"])
    half = max(dim // 2, 1)
    frequencies = site.constant(max_period ** (-np.arange(half) / half))
    return per_result(_timestep, site, frequencies, dim)


declare("arange", _bind_arange)
declare("timestep_embedding", _bind_timestep)
