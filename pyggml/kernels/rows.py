"""The CPU's kernels of formulas with reductions: a task takes rows, one after the other.

Sums are in lanes, whose number depends on the machine, as those of other kernels do. All else is as
written: what a row has in common is divided by once, not for each element.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from pyggml.formulas.formula import Formula
from pyggml.formulas.text import define
from pyggml.graph.call import Call
from pyggml.jit import JIT, Code, types
from pyggml.jit.decorators import apart
from pyggml.jit.regions import run_shares
from pyggml.jit.simd import LEAST_KEY
from pyggml.jit.tasks import SHARE
from pyggml.kernels.formulas import NAMES, PYTHON
from pyggml.kernels.kernel import Site, as_rows

_NAMES = {**NAMES, "LEAST_KEY": LEAST_KEY, "__name__": __name__}
_START = {"sum": "f4(0)", "largest": "LEAST_KEY"}
_ADD = {"sum": "{0} = plus({0}, {1})", "largest": "{0} = max({0}, key_of({1}))"}
_END = {"sum": "", "largest": "{0} = of_key({0})"}


def rows_text(name: str, formula: Formula) -> str:
    """The function name(results …, sources …, settings …, first, last) for these rows of arrays."""
    names = [*(f"y{i}" for i in range(len(formula.results))), *formula.sources]
    rows = [f"_{s} = {s}_rows[{0 if s in formula.shared else 'r'}]" for s in names]
    lines = [*rows, f"n = f4(_{formula.sources[0]}.size)", *_passes(formula)]
    arguments = [*(f"{s}_rows" for s in names), *formula.settings, "first", "last"]
    body = "".join(f"        {line}\n" for line in lines)
    return f"def {name}({', '.join(arguments)}):\n    for r in range(first, last):\n{body}"


def _passes(formula: Formula) -> Iterator[str]:
    """The lines of a row: of its passes, and between them."""
    for step in formula.rows.passes(formula.results):
        statements, values = PYTHON.lines([value for _, value in step.common])
        yield from statements
        yield from (f"{c} = {v}" for (c, _), v in zip(step.common, values, strict=True))
        yield from (f"{s} = {_START[how]}" for how, s in step.sums)
        yield f"for i in range(_{formula.sources[0]}.size):"
        yield from (f"    {s} = _{s}[i]" for s in formula.sources_of(*step.values))
        statements, values = PYTHON.lines(step.values)
        yield from (f"    {line}" for line in statements)
        if not step.sums:
            yield from (f"    _y{i}[i] = {value}" for i, value in enumerate(values))
        for (how, s), value in zip(step.sums, values, strict=bool(step.sums)):
            yield f"    {_ADD[how].format(s, value)}"
        yield from filter(None, (_END[how].format(s) for how, s in step.sums))


def _task_text(loop: str, formula: Formula) -> str:
    """The task that gives the loop its share of the rows."""
    names = [f"a{i}" for i in range(len(formula.results) + len(formula.sources))]
    arguments = ", ".join((*names, *formula.settings))
    return (
        f"def {loop}_task(arguments, task, thread):\n"
        f"    {arguments}, per = arguments[0]\n"
        f"    first = task * per\n"
        f"    {loop}({arguments}, first, min(first + per, a0.shape[0]))\n"
    )


@cache
def rows_of(formula: Formula) -> Callable[..., Any]:
    """The loop as plain Python."""
    name = f"{formula.name}_rows"
    return define(rows_text(name, formula), name, _NAMES)


@cache
def code_of_rows(formula: Formula) -> Code:
    """The task, whose machine code reads a tuple: results, sources, settings, rows of a task."""
    digest = hashlib.sha256(rows_text("", formula).encode()).hexdigest()[:12]
    name = f"{formula.name}_{digest}"  # says what its text is
    loop = apart(define(rows_text(name, formula), name, _NAMES), fuses=True)
    task = define(_task_text(name, formula), f"{name}_task", {**_NAMES, name: loop})
    rows = types.Array(types.float32, 2, "C")
    takes = [rows] * (len(formula.results) + len(formula.sources))
    takes += [types.float32] * len(formula.settings)
    frame = types.Tuple([*takes, types.intp])
    return Code(task, types.void(types.CPointer(frame), types.intp, types.intp))


def by_row(formula: Formula) -> Callable[[Site], Call]:
    """What binds the kernel of a formula with reductions to a node."""

    def run(site: Site) -> Call:
        arrays = [as_rows(a) for a in (site.out, *site.saved, *site.src)]
        settings = [np.float32(site.node.params[name]) for name in formula.settings]
        return call_by_row(formula, arrays, settings)

    return run


def call_by_row(formula: Formula, arrays: list[np.ndarray], settings: list[np.float32]) -> Call:
    """A call of a formula's kernel on rows."""
    n_rows, n = arrays[0].shape
    if not JIT:
        return Call(rows_of(formula), *arrays, *settings, 0, n_rows)
    per = max(1, SHARE // max(1, n))
    arguments = (*arrays, *settings, per)
    return Call(run_shares, code_of_rows(formula).address, -(-n_rows // per), arguments)
