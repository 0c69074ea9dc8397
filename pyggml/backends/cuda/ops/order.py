"""The order of numbers, and what is made of positions: argsort, top_k, spans, temperatures."""

from __future__ import annotations

import math

import numpy as np

from pyggml.backends.cuda.code.formulas import ONE
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call


@device
def _comes_before(a, i, b, j, descending):
    """Whether number a at i stands before b at j; equal ones keep their order, NaN comes last."""
    if a == b or (a != a and b != b):
        return i < j
    if a != a or b != b:
        return b != b
    return a > b if descending else a < b


@kernel
def _ranked(out, x, n, n_kept, descending):
    """Each number counts those before it: that is its place. n² comparisons of a row."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, j = i // n, i % n
        place = 0
        for other in range(n):
            if _comes_before(x[row * n + other], other, x[i], j, descending):
                place += 1
        if place < n_kept:
            out[row * n_kept + place] = j


def _argsort(site: Site) -> Call:
    n = site.node.shape[-1]
    arguments = (site.out, *site.src, n, n, bool(site.node.params["descending"]))
    return per_element(_ranked, site.out.size, site.stream, *arguments)


def _top_k(site: Site) -> Call:
    x, k = site.node.src[0], site.node.params["k"]
    return per_element(
        _ranked, x.n_elements, site.stream, site.out, *site.src, x.shape[-1], k, True
    )


@kernel
def _window_span(out, span, window):
    for t in range(cuda.grid(1), out.size // 2, cuda.gridsize(1)):
        out[2 * t] = max(span[2 * t], span[2 * t + 1] - window)
        out[2 * t + 1] = span[2 * t + 1]


def _bind_span(site: Site) -> Call:
    window = np.int32(min(site.node.params["window"], 2**31 - 1))
    return per_element(_window_span, site.out.size // 2, site.stream, site.out, *site.src, window)


@kernel
def _log_temperature(out, positions, strength, every):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = ONE + strength * math.log(ONE + np.float32(positions[i] // every))


def _bind_temperature(site: Site) -> Call:
    arguments = (site.out, *site.src, *site.scalars)
    return per_element(_log_temperature, site.out.size, site.stream, *arguments)


declare("argsort", Kernel(_argsort))
declare("top_k", Kernel(_top_k))
declare("window_span", Kernel(_bind_span))
declare("log_temperature", Kernel(_bind_temperature))
