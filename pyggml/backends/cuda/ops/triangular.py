"""Triangular and diagonal matrices: see pyggml/ops/layout/triangular.py."""

from __future__ import annotations

from collections.abc import Callable

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call


@kernel
def _tri(out, x, n, is_lower, first):
    """out = x where that lies `first` or more beyond the diagonal, else 0."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        beyond = i % n - i // n % n
        if is_lower:
            beyond = -beyond
        out[i] = x[i] if beyond >= first else ZERO


def _bind_tri(site: Site) -> Call:
    n, kind = site.node.shape[-1], site.node.params["kind"]
    rest = n, kind.startswith("lower"), 0 if kind.endswith("_diag") else 1
    return per_element(_tri, site.out.size, site.stream, site.out, *site.src, *rest)


@kernel
def _solve(x, a, b, n, m, transposed):
    """X of A X = B or Aᵀ X = B, a thread for each column: each row after those that it needs."""
    for e in range(cuda.grid(1), x.size // n, cuda.gridsize(1)):
        matrix, column = e // m, e % m
        of_a, of_x = matrix * n * n, matrix * n * m + column
        for step in range(n):
            i = n - 1 - step if transposed else step
            rest = b[of_x + i * m]
            for known in range(step):
                t = n - 1 - known if transposed else known
                factor = a[of_a + t * n + i] if transposed else a[of_a + i * n + t]
                rest -= factor * x[of_x + t * m]
            x[of_x + i * m] = rest / a[of_a + i * n + i]


def _bind_solve(transposed: bool) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        n, m = site.node.shape[-2:]
        columns = site.out.size // n
        arrays = site.out, *site.src
        return per_element(_solve, columns, site.stream, *arrays, n, m, transposed)

    return bind


@kernel
def _diag(out, x, n):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        row = i // n
        out[i] = x[row // n * n + i % n] if row % n == i % n else ZERO


@kernel
def _diag_back(out, dy, n):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = dy[i * n + i % n]


def _bind_diag(site: Site) -> Call:
    n = site.node.shape[-1]
    return per_element(_diag, site.out.size, site.stream, site.out, *site.src, n)


def _bind_diag_back(site: Site) -> Call:
    n = site.node.shape[-1]
    return per_element(_diag_back, site.out.size, site.stream, site.out, *site.src, n)


declare("tri", Kernel(_bind_tri))
declare("solve_tri", Kernel(_bind_solve(transposed=False)))
declare("solve_tri_t", Kernel(_bind_solve(transposed=True)))
declare("diag", Kernel(_bind_diag))
declare("diag_back", Kernel(_bind_diag_back))
