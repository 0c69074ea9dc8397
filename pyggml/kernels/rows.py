"""The CPU's kernels of formulas with reductions: a task takes rows, one after the other.

Sums are in lanes, whose number depends on the machine, as those of other kernels do. All else is as
written: what a row has in common is divided by once, not for each element.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from pyggml.formulas.formula import Formula
from pyggml.formulas.rows import Pass
from pyggml.formulas.text import define
from pyggml.graph.call import Call
from pyggml.graph.tensor import MAX_AXES
from pyggml.jit import JIT, Code, types
from pyggml.jit.decorators import apart
from pyggml.jit.regions import run_shares
from pyggml.jit.simd import LEAST_KEY
from pyggml.jit.tasks import SHARE
from pyggml.kernels.formulas import NAMES, PYTHON
from pyggml.kernels.kernel import Site, as_four, as_rows

_NAMES = {**NAMES, "LEAST_KEY": LEAST_KEY, "__name__": __name__}
_START = {"sum": "f4(0)", "largest": "LEAST_KEY"}
_ADD = {"sum": "{0} = plus({0}, {1})", "largest": "{0} = max({0}, key_of({1}))"}
_END = {"sum": "", "largest": "{0} = of_key({0})"}


def rows_text(name: str, formula: Formula) -> str:
    """The function name(results …, sources …, settings …, first, last) for these rows of arrays."""
    results = [f"y{i}" for i in range(len(formula.results))]
    passes = list(formula.rows.passes(formula.results, keeps=True))
    lines = list(_rows(formula, results))
    if any(step.kept is not None for step in passes):
        lines += [f"_kept = _{y}" for i, y in enumerate(results) if formula.differs(i)]
    lines += [f"n = f4(_{formula.along[0]}.size)"]
    lines += [line for step in passes for line in _lines(formula, step)]
    names = (f"{s}_rows" for s in (*results, *formula.sources))
    body = "".join(f"        {line}\n" for line in lines)
    arguments = ", ".join((*names, *formula.settings, "first", "last"))
    return f"def {name}({arguments}):\n    for r in range(first, last):\n{body}"


def _rows(formula: Formula, results: Sequence[str]) -> Iterator[str]:
    """What names row r of each array, and the one number that it has of some."""
    whole, repeats = "r", "r % {0}_rows.shape[0]"
    if formula.tiled:
        shape = f"{formula.along[0]}_rows.shape"
        yield f"b, h = r // ({shape}[1] * {shape}[2]), r // {shape}[2] % {shape}[1]"
        yield f"q = r % {shape}[2]"
        whole = "b, h, q"
        repeats = ", ".join(f"{i} % {{0}}_rows.shape[{at}]" for at, i in enumerate("bhq"))
    for s in (*results, *formula.along):
        row = "0" if s in formula.shared else repeats.format(s) if s in formula.tiled else whole
        yield f"_{s} = {s}_rows[{row}]"
    yield from (f"{s} = f4({s}_rows[{repeats.format(s)}, 0])" for s in formula.single)


def _lines(formula: Formula, step: Pass) -> Iterator[str]:
    """A pass over a row, and what stands before and after it."""
    statements, values = PYTHON.lines([value for _, value in step.common])
    yield from statements
    yield from (f"{c} = {v}" for (c, _), v in zip(step.common, values, strict=True))
    yield from (f"{s} = {_START[how]}" for how, s in step.sums)
    yield from _loop(formula, step)
    yield from filter(None, (_END[how].format(s) for how, s in step.sums))


def _loop(formula: Formula, step: Pass) -> Iterator[str]:
    """The loop over a row; what has one number for a row is stored apart."""
    statements, values = PYTHON.lines(step.values)
    differ = [bool(step.sums) or formula.rows.differs(value) for value in step.values]
    if any(differ):
        yield f"for i in range(_{formula.along[0]}.size):"
        places = {"place": "f4(np.int32(i))"}
        reads = formula.reads(*step.values)
        yield from (f"    {s} = {places.get(s, f'_{s}[i]')}" for s in reads)
        yield from (f"    {line}" for line in statements)
    for i, value in enumerate(values):
        if not step.sums:
            yield f"    _y{i}[i] = {value}" if differ[i] else f"_y{i}[0] = {value}"
            continue
        how, s = step.sums[i]
        if i == step.kept:
            yield f"    kept = _kept[i] = {value}"
            value = "kept"
        yield f"    {_ADD[how].format(s, value)}"


def _task_text(loop: str, formula: Formula) -> str:
    """The task that gives the loop its share of the rows."""
    n_arrays = len(formula.results) + len(formula.sources)
    arguments = ", ".join((*(f"a{i}" for i in range(n_arrays)), *formula.settings))
    return (
        f"def {loop}_task(arguments, task, thread):\n"
        f"    {arguments}, per, n_rows = arguments[0]\n"
        f"    first = task * per\n"
        f"    {loop}({arguments}, first, min(first + per, n_rows))\n"
    )


@cache
def rows_of(formula: Formula) -> Callable[..., Any]:
    """The loop as plain Python."""
    name = f"{formula.name}_rows"
    return define(rows_text(name, formula), name, _NAMES)


@cache
def code_of_rows(formula: Formula, kinds: tuple[np.dtype, ...]) -> Code:
    """The task, whose machine code reads a tuple: results, sources, settings, rows of a task.

    kinds: of the numbers of results and sources
    """
    digest = hashlib.sha256(repr((kinds, rows_text("", formula))).encode()).hexdigest()[:12]
    name = f"{formula.name}_{digest}"  # says what its text is
    loop = apart(define(rows_text(name, formula), name, _NAMES), fuses=True)
    task = define(_task_text(name, formula), f"{name}_task", {**_NAMES, name: loop})
    n_axes = MAX_AXES if formula.tiled else 2
    takes = [types.Array(getattr(types, kind.name), n_axes, "C") for kind in kinds]
    takes += [types.float32] * len(formula.settings)
    frame = types.Tuple([*takes, types.intp, types.intp])
    return Code(task, types.void(types.CPointer(frame), types.intp, types.intp))


def by_row(formula: Formula) -> Callable[[Site], Call]:
    """What binds the kernel of a formula with reductions to a node."""

    def run(site: Site) -> Call:
        settings = [np.float32(site.node.params[name]) for name in formula.settings]
        return call_by_row(formula, [site.out], site.src, *settings)

    return run


def call_by_row(
    formula: Formula,
    results: Sequence[np.ndarray],
    sources: Sequence[np.ndarray],
    *settings: np.float32,
) -> Call:
    """A call of a formula's kernel on arrays whose last axis is a row, or who have one number for
    each row. Where sources are tiled, arrays have the axes of rows too, and each one number in its
    last axis."""
    names = (*(f"y{i}" for i in range(len(results))), *formula.sources)
    single = {
        *formula.single,
        *(y for i, y in enumerate(names[: len(results)]) if not formula.differs(i)),
    }
    given = dict(zip(names, (*results, *sources), strict=True))
    if formula.tiled:
        arrays = [as_four(a) for a in given.values()]
    else:
        arrays = [a.reshape(-1, 1) if s in single else as_rows(a) for s, a in given.items()]
    *axes, n = arrays[names.index(formula.along[0])].shape
    n_rows = prod(axes)
    if not JIT:
        return Call(rows_of(formula), *arrays, *settings, 0, n_rows)
    per = max(1, SHARE // max(1, n))
    code = code_of_rows(formula, tuple(a.dtype for a in arrays))
    return Call(run_shares, code.address, -(-n_rows // per), (*arrays, *settings, per, n_rows))
