"""Element by element: one number of the result from one number of each source, by a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.backends.cuda.driver import cuda, kernel
from pyggml.backends.cuda.kernel import Kernel, Site
from pyggml.backends.cuda.launch import per_element
from pyggml.call import Call


def of_one(formula: Any) -> Kernel:
    """y_i = formula(x_i, *params)."""

    @kernel
    def run(y, x, params):
        apart = cuda.gridsize(1)
        for i in range(cuda.grid(1), y.size, 2 * apart):
            j = min(i + apart, y.size - 1)
            first, second = x[i], x[j]  # two loads under way: y may be x, so none would come ahead
            y[i] = formula(first, *params)
            if i + apart < y.size:
                y[j] = formula(second, *params)

    return Kernel(_bound(run))


def of_two(formula: Any) -> Kernel:
    """y_i = formula(a_i, b_i, *params); a and b have y's shape."""

    @kernel
    def run(y, a, b, params):
        for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
            y[i] = formula(a[i], b[i], *params)

    return Kernel(_bound(run))


def of_three(formula: Any) -> Kernel:
    """y_i = formula(a_i, b_i, c_i, *params); all have y's shape."""

    @kernel
    def run(y, a, b, c, params):
        for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
            y[i] = formula(a[i], b[i], c[i], *params)

    return Kernel(_bound(run))


def _bound(run: Any) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        n = site.node.n_elements
        return per_element(run, n, site.stream, site.out, *site.src, site.scalars)

    return bind
