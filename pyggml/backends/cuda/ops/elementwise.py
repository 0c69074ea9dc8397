"""Element by element: one number of the result from one number of each source, by a formula.

A thread takes four neighbours at a time where all arrays can be moved so; then any of them may be
BF16 (rewrites/narrow.py).
"""

from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.axes import repeated_places
from pyggml.backends.cuda.code.formulas import device_formula, lanes_of
from pyggml.backends.cuda.code.fours import loader, storer, vectorizable
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import per_element, per_result
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.formula import Formula
from pyggml.formulas.text import define
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.ops import OPS

_TEXT = """
def closing_over(formula, lanes, store, loads):
    {loads} = loads

    def {name}_singly(out, {sources}, settings):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula({numbers}, *settings)

    def {name}_fours(out, {sources}, settings):
        for four in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
            i = 4 * four
            store(out, i, *lanes({fours}, settings))

    return {name}_singly, {name}_fours
"""
_NAMES = {"cuda": cuda, "__name__": __name__}


@cache
def _kernels(formula: Formula, in_bf16: tuple[bool, ...]) -> tuple[Any, Any]:
    """kernel(out, *sources, settings) for any float32 arrays, and for those that lie in fours.
    in_bf16: whether each array is BF16, of the latter"""
    text = _TEXT.format(
        name=formula.name,
        sources=", ".join(formula.sources),
        loads="".join(f"load_{s}, " for s in formula.sources),
        numbers=", ".join(f"{s}[i]" for s in formula.sources),
        fours=", ".join(f"load_{s}({s}, i)" for s in formula.sources),
    )
    make, loads = define(text, "closing_over", _NAMES), tuple(map(loader, in_bf16[1:]))
    lanes = lanes_of(formula, 4)
    single, fours = make(device_formula(formula), lanes, storer(in_bf16[0]), loads)
    return kernel(single), kernel(fours)


@cache
def _repeating_kernel(of: Formula, place: Any) -> Any:
    """kernel(out, a, b, …) with b repeated to a, ggml's way."""
    formula = device_formula(of)

    @kernel
    def repeating(out, a, b, first, second):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = formula(a[i], b[place(i, first, second)])

    return repeating


def _elementwise(formula: Formula, site: CudaSite) -> Call:
    """y_i = formula(a_i, b_i, …; settings); the second of two sources may be smaller than y."""
    arrays, n = (site.out, *site.src), site.node.n_elements
    if any(s.n_elements != n for s in site.node.src):
        place, *where = repeated_places(*(s.shape for s in site.node.src))
        return per_result(_repeating_kernel(formula, place), site, *where)
    in_bf16 = tuple(a.dtype == BF16.numpy for a in arrays)
    single, fours = _kernels(formula, in_bf16)
    settings = tuple(np.float32(site.node.params[name]) for name in formula.settings)
    if vectorizable(*arrays):
        return per_element(fours, n // 4, site.stream, *arrays, settings)
    assert not any(in_bf16)
    return per_element(single, n, site.stream, *arrays, settings)


for _op in OPS.values():
    if _op.formula is not None and not _op.formula.of_rows:
        declare(_op.name, partial(_elementwise, _op.formula))
