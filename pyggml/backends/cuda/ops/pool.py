"""Pools of maxima and their gradient: see pyggml/ops/image/pool.py. Mean pools: resample.py."""

from __future__ import annotations

import math

import numpy as np

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call

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


def _bind(site: Site) -> Call:
    p, (x,) = site.node.params, site.node.src
    window = (tuple(p[name]) for name in ("size", "stride", "padding"))
    arrays = site.out, site.saved[0], site.src[0]
    shapes = site.node.shape[2:], x.shape[2:]
    return per_element(_pool_max, site.out.size, site.stream, *arrays, *window, *shapes)


def _bind_back(site: Site) -> Call:
    (*batch, height, width), dy = site.node.shape, site.node.src[0]
    n, n_planes = height * width, batch[0] * batch[1]
    fault = site.faults.number(f"pool_max_back: an index is not one of {n} elements")
    rest = n, dy.n_elements // n_planes, site.faults.cell, fault
    return per_element(_pool_max_back, n_planes, site.stream, site.out, *site.src, *rest)


declare("pool_max", Kernel(_bind))
declare("pool_max_back", Kernel(_bind_back))
