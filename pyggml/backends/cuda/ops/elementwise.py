"""Element by element: one number of the result from one number of each source, by a formula.

A thread takes four neighbours at a time where all arrays can be moved so. A formula is a device
function, or a plain one that becomes one.
"""

from collections.abc import Callable
from typing import Any

from pyggml.backends.cuda.code.fours import load_four, store_four, vectorizable
from pyggml.backends.cuda.code.jit import as_device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.graph.call import Call


def of_one(formula: Any) -> Kernel:
    """y_i = formula(x_i, *params)."""
    formula = as_device(formula)

    @kernel
    def run(y, x, params):
        for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
            y[i] = formula(x[i], *params)

    @kernel
    def run_fours(y, x, params):
        for four in range(cuda.grid(1), y.size // 4, cuda.gridsize(1)):
            a, b, c, d = load_four(x, 4 * four)
            store_four(
                y, 4 * four, formula(a, *params), formula(b, *params), formula(c, *params),
                formula(d, *params),
            )  # fmt: skip

    return Kernel(_binder(run, run_fours))


def of_two(formula: Any) -> Kernel:
    """y_i = formula(a_i, b_i, *params); a and b have y's shape."""
    formula = as_device(formula)

    @kernel
    def run(y, a, b, params):
        for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
            y[i] = formula(a[i], b[i], *params)

    @kernel
    def run_fours(y, a, b, params):
        for four in range(cuda.grid(1), y.size // 4, cuda.gridsize(1)):
            p, q = load_four(a, 4 * four), load_four(b, 4 * four)
            store_four(
                y, 4 * four, formula(p[0], q[0], *params), formula(p[1], q[1], *params),
                formula(p[2], q[2], *params), formula(p[3], q[3], *params),
            )  # fmt: skip

    return Kernel(_binder(run, run_fours))


def of_three(formula: Any) -> Kernel:
    """y_i = formula(a_i, b_i, c_i, *params); all have y's shape."""
    formula = as_device(formula)

    @kernel
    def run(y, a, b, c, params):
        for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
            y[i] = formula(a[i], b[i], c[i], *params)

    @kernel
    def run_fours(y, a, b, c, params):
        for four in range(cuda.grid(1), y.size // 4, cuda.gridsize(1)):
            i = 4 * four
            p, q, r = load_four(a, i), load_four(b, i), load_four(c, i)
            store_four(
                y, i, formula(p[0], q[0], r[0], *params), formula(p[1], q[1], r[1], *params),
                formula(p[2], q[2], r[2], *params), formula(p[3], q[3], r[3], *params),
            )  # fmt: skip

    return Kernel(_binder(run, run_fours))


def _binder(run: Any, run_fours: Any) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        arrays, n = (site.out, *site.src), site.node.n_elements
        if all(s.n_elements == n for s in site.node.src) and vectorizable(*arrays):
            return per_element(run_fours, n // 4, site.stream, *arrays, site.scalars)
        return per_element(run, n, site.stream, *arrays, site.scalars)

    return bind
