"""Convolutions and their windows, a thread for each number: see ops/image/conv.py, im2col.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Shape


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


def _geometry(site: Site) -> tuple[Shape, Shape, Shape]:
    """(stride, padding, dilation), each by axis."""
    p = site.node.params
    return tuple(p["stride"]), tuple(p["padding"]), tuple(p["dilation"])


def _bound(run: Any, y: int, w: int, x: int) -> Callable[[Site], Call]:
    """y, w, x: which of (the result, the two sources) each is."""

    def bind(site: Site) -> Call:
        tensors = (site.node, *site.node.src)
        shapes = (tensors[i].shape for i in (y, w, x))
        rest = (*shapes, _geometry(site), site.node.params["groups"])
        return per_element(run, site.out.size, site.stream, site.out, *site.src, *rest)

    return bind


def _windows(run: Any, is_back: bool) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        (x,), cols = site.node.src, site.node
        if is_back:
            x, cols = cols, x
        rest = (cols.shape, tuple(site.node.params["size"]), x.shape, _geometry(site))
        return per_element(run, site.out.size, site.stream, site.out, *site.src, *rest)

    return bind


declare("conv_2d_direct", Kernel(_bound(_conv, y=0, w=1, x=2)))
declare("conv_transpose_2d", Kernel(_bound(_conv_back_x, y=2, w=1, x=0)))
declare("conv_2d_back_w", Kernel(_bound(_conv_back_w, y=1, w=0, x=2)))
declare("im2col", Kernel(_windows(_im2col, is_back=False)))
declare("im2col_back", Kernel(_windows(_im2col_back, is_back=True)))
