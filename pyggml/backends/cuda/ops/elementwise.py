"""Element by element: one number of the result from one number of each source, by a formula.

A thread takes four neighbours at a time where all arrays can be moved so.
"""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.axes import along_one_axis, place_in_run, sizes, tile_offset
from pyggml.backends.cuda.code.formulas import device_formula, lanes_of
from pyggml.backends.cuda.code.fours import load_four, store_four, vectorizable
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.formula import Formula
from pyggml.formulas.text import define
from pyggml.graph.call import Call
from pyggml.ops import OPS

_TEXT = """
def closing_over(formula, lanes):
    def {name}_singly(out, {sources}, settings):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula({numbers}, *settings)

    def {name}_fours(out, {sources}, settings):
        for four in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
            i = 4 * four
            store_four(out, i, *lanes({fours}, settings))

    return {name}_singly, {name}_fours
"""
_NAMES = {"cuda": cuda, "load_four": load_four, "store_four": store_four, "__name__": __name__}


@cache
def _kernels(formula: Formula) -> tuple[Any, Any]:
    """kernel(out, *sources, settings) for any arrays, and for those that lie in fours."""
    text = _TEXT.format(
        name=formula.name,
        sources=", ".join(formula.sources),
        numbers=", ".join(f"{s}[i]" for s in formula.sources),
        fours=", ".join(f"load_four({s}, i)" for s in formula.sources),
    )
    make = define(text, "closing_over", _NAMES)
    single, fours = make(device_formula(formula), lanes_of(formula, 4))
    return kernel(single), kernel(fours)


@cache
def _repeating_kernels(of: Formula) -> tuple[Any, Any, Any]:
    """kernel(out, a, b, …) with b repeated to a: as a whole, along one axis, as tiles."""
    formula = device_formula(of)

    @kernel
    def cycling(out, a, b):  # whole tiles one after the other
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula(a[i], b[i % b.size])

    @kernel
    def write_runs(out, a, b, n, times):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula(a[i], b[place_in_run(i, n, times)])

    @kernel
    def write_tiles(out, a, b, shape, small):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula(a[i], b[tile_offset(i, shape, small)])

    return cycling, write_runs, write_tiles


def _repeating(formula: Formula, site: CudaSite) -> Call:
    """out = formula(a, b repeated to a's shape as tiles, ggml's way)."""
    a, b = site.node.src
    cycling, write_runs, write_tiles = _repeating_kernels(formula)
    run = (site.node.n_elements, site.stream, site.out, *site.src)
    large, small = sizes(a.shape), sizes(b.shape)
    first = next(i for i, n in enumerate(small) if n != 1 or i == len(small) - 1)
    if small[first + 1 :] == large[first + 1 :] and (
        small[first] == large[first] or first == len(small) - 1
    ):
        return per_element(cycling, *run)
    runs = along_one_axis(a.shape, b.shape)
    if runs is not None:
        return per_element(write_runs, *run, *runs)
    return per_element(write_tiles, *run, large, small)


def elementwise(formula: Formula) -> CudaKernel:
    """y_i = formula(a_i, b_i, …; settings); the second of two sources may be smaller than y."""

    def bind(site: CudaSite) -> Call:
        arrays, n = (site.out, *site.src), site.node.n_elements
        if any(s.n_elements != n for s in site.node.src):
            return _repeating(formula, site)
        single, fours = _kernels(formula)
        settings = tuple(np.float32(site.node.params[name]) for name in formula.settings)
        if vectorizable(*arrays):
            return per_element(fours, n // 4, site.stream, *arrays, settings)
        return per_element(single, n, site.stream, *arrays, settings)

    return CudaKernel(bind)


for _op in OPS.values():
    if _op.formula is not None and not _op.formula.of_rows:
        declare(_op.name, elementwise(_op.formula))
