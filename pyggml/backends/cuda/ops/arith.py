"""Arithmetic of two tensors, the second repeated to the first's shape as tiles (ggml's way)."""

from __future__ import annotations

from typing import Any

from pyggml.backends.cuda.code.axes import sizes, tile_offset
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.elementwise import of_two
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call


@device
def _add(a, b):
    return a + b


@device
def _sub(a, b):
    return a - b


@device
def _mul(a, b):
    return a * b


@device
def _div(a, b):
    return a / b


def _repeating(formula: Any) -> Kernel:
    """out = formula(a, b repeated)."""
    alike = of_two(formula)

    @kernel
    def cycling(out, a, b):  # whole tiles one after the other
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula(a[i], b[i % b.size])

    @kernel
    def tiled(out, a, b, shape, small):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula(a[i], b[tile_offset(i, shape, small)])

    def bind(site: Site) -> Call:
        a, b = site.node.src
        if a.n_elements == b.n_elements:
            return alike.bind(site)
        run = (site.node.n_elements, site.stream, site.out, *site.src)
        large, small = sizes(a.shape), sizes(b.shape)
        first = next(i for i, n in enumerate(small) if n != 1 or i == len(small) - 1)
        if small[first + 1 :] == large[first + 1 :] and (
            small[first] == large[first] or first == len(small) - 1
        ):
            return per_element(cycling, *run)
        return per_element(tiled, *run, large, small)

    return Kernel(bind)


for _name, _formula in {"add": _add, "add1": _add, "sub": _sub, "mul": _mul, "div": _div}.items():
    declare(_name, _repeating(_formula))
