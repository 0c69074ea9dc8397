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
from pyggml.formulas.rows import SUMS, Pass
from pyggml.formulas.text import define, float32_python
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import Shape
from pyggml.jit import JIT, Code, types
from pyggml.jit.decorators import apart
from pyggml.jit.simd import LEAST_KEY
from pyggml.jit.tasks import SHARE, Extent, launch, tuple_stage
from pyggml.kernels.formulas import FUNCTIONS, NAMES, STORES
from pyggml.kernels.kernel import Site, as_rows

# Exponentials are of what is below the greatest of a row, or not far above.
_PYTHON = float32_python({**FUNCTIONS, "exp": "exp32({0})"})
_NAMES = {**NAMES, "LEAST_KEY": LEAST_KEY, "__name__": __name__}
_START = {"sum": "f4(0)", "wide_sum": "np.float64(0)", "largest": "LEAST_KEY"}
_ADD = dict.fromkeys(SUMS, "{0} = plus({0}, {1})") | {"largest": "{0} = max({0}, key_of({1}))"}
_END = {"sum": "", "wide_sum": "{0} = f4({0})", "largest": "{0} = of_key({0})"}


def rows_text(name: str, formula: Formula, is_narrow: bool = False) -> str:
    """The function name(results …, sources …, tables …, settings …, first, last) for these rows of
    arrays. tables: of each tiled source, which of its rows each row takes; is_narrow: results are
    of bfloat16"""
    results = [f"y{i}" for i in range(len(formula.results))]
    passes = list(formula.rows.passes(formula.results, keeps=True))
    lines = list(_rows(formula, results))
    if any(step.kept is not None for step in passes):
        lines += [f"_kept = _{y}" for i, y in enumerate(results) if formula.differs(i)]
    lines += [f"n = f4(_{formula.along[0]}.size)"]
    store = STORES[BF16] if is_narrow else "{0}"
    lines += [line for step in passes for line in _lines(formula, step, store)]
    names = [f"{s}_rows" for s in (*results, *formula.sources)] + [f"{s}_at" for s in formula.tiled]
    body = "".join(f"        {line}\n" for line in lines)
    arguments = ", ".join((*names, *formula.settings, "first", "last"))
    return f"def {name}({arguments}):\n    for r in range(first, last):\n{body}"


def _rows(formula: Formula, results: Sequence[str]) -> Iterator[str]:
    """What names row r of each array, and the one number that it has of some."""
    rows = {s: f"{s}_at[r]" for s in formula.tiled} | dict.fromkeys(formula.shared, "0")
    yield from (f"_{s} = {s}_rows[{rows.get(s, 'r')}]" for s in (*results, *formula.along))
    for s in formula.single:
        yield f"{s} = f4({s}_rows[{rows.get(s, f'r % {s}_rows.shape[0]')}, 0])"


def _lines(formula: Formula, step: Pass, store: str) -> Iterator[str]:
    """A pass over a row, and what stands before and after it."""
    statements, values = _PYTHON.lines([value for _, value in step.common])
    yield from statements
    yield from (f"{c} = {v}" for (c, _), v in zip(step.common, values, strict=True))
    yield from (f"{s} = {_START[how]}" for how, s in step.sums)
    yield from _loop(formula, step, store)
    yield from filter(None, (_END[how].format(s) for how, s in step.sums))


def _loop(formula: Formula, step: Pass, store: str) -> Iterator[str]:
    """The loop over a row; what has one number for a row is stored apart."""
    statements, values = _PYTHON.lines(step.values)
    differ = [bool(step.sums) or formula.rows.differs(value) for value in step.values]
    if any(differ):
        yield f"for i in range(_{formula.along[0]}.size):"
        places = {"place": "f4(np.int32(i))"}
        reads = formula.reads(*step.values)
        yield from (f"    {s} = {places.get(s, f'_{s}[i]')}" for s in reads)
        yield from (f"    {line}" for line in statements)
    for i, value in enumerate(values):
        if not step.sums:
            value = store.format(value)
            yield f"    _y{i}[i] = {value}" if differ[i] else f"_y{i}[0] = {value}"
            continue
        how, s = step.sums[i]
        if i == step.kept:
            yield f"    kept = _kept[i] = {value}"
            value = "kept"
        yield f"    {_ADD[how].format(s, value)}"


def _task_text(loop: str, formula: Formula) -> str:
    """The task that gives the loop its share of the rows."""
    n_arrays = len(formula.results) + len(formula.sources) + len(formula.tiled)
    arguments = ", ".join((*(f"a{i}" for i in range(n_arrays)), *formula.settings))
    return (
        f"def {loop}_task(arguments, task, thread):\n"
        f"    {arguments}, per, n_rows = arguments[0]\n"
        f"    first = task * per\n"
        f"    {loop}({arguments}, first, min(first + per, n_rows))\n"
    )


@cache
def rows_of(formula: Formula, is_narrow: bool = False) -> Callable[..., Any]:
    """The loop as plain Python."""
    name = f"{formula.name}_rows"
    return define(rows_text(name, formula, is_narrow), name, _NAMES)


@cache
def code_of_rows(formula: Formula, kinds: tuple[np.dtype, ...]) -> Code:
    """The task, whose machine code reads a tuple: results, sources, settings, rows of a task.

    kinds: of the numbers of results and sources
    """
    is_narrow = kinds[0] == np.uint16
    text = rows_text("", formula, is_narrow)
    digest = hashlib.sha256(repr((kinds, text)).encode()).hexdigest()[:12]
    name = f"{formula.name}_{digest}"  # says what its text is
    loop = apart(define(rows_text(name, formula, is_narrow), name, _NAMES), fuses=True)
    task = define(_task_text(name, formula), f"{name}_task", {**_NAMES, name: loop})
    takes = [types.Array(getattr(types, kind.name), 2, "C") for kind in kinds]
    takes += [types.Array(types.intp, 1, "C")] * len(formula.tiled)
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
    axes: Sequence[Shape] = (),
) -> Call:
    """A call of a formula's kernel on arrays whose last axis is a row, or who have one number for
    each row.  axes: of the rows of each source, where some are tiled"""
    names = (*(f"y{i}" for i in range(len(results))), *formula.sources)
    one_each = (y for i, y in enumerate(names[: len(results)]) if not formula.differs(i))
    single = {*formula.single, *one_each}
    named = zip(names, (*results, *sources), strict=True)
    arrays = [a.reshape(-1, 1) if s in single else as_rows(a) for s, a in named]
    n_rows, n = arrays[names.index(formula.along[0])].shape
    of_source = dict(zip(formula.sources, axes, strict=bool(axes)))
    tables = [_tiles(of_source[formula.along[0]], of_source[s]) for s in formula.tiled]
    if not JIT:
        is_narrow = results[0].dtype == np.uint16
        return Call(rows_of(formula, is_narrow), *arrays, *tables, *settings, 0, n_rows)
    per = max(1, SHARE // max(1, n))
    code = code_of_rows(formula, tuple(a.dtype for a in arrays))
    frame = (*arrays, *tables, *settings, per, n_rows)
    touches = [
        Extent.of(a, per if len(a) == n_rows else 0, i >= len(results))
        for i, a in enumerate(arrays)
    ]
    return Call(launch, tuple_stage(code, frame, -(-n_rows // per), None, touches))


def _tiles(rows: Shape, of_source: Shape) -> np.ndarray:
    """Which row of a source each row takes, where the source's are repeated over the axes."""
    places = np.arange(prod(of_source)).reshape(of_source)
    return np.tile(places, np.floor_divide(rows, of_source)).reshape(-1)
