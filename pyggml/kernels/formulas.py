"""The CPU's kernels of formulas: text of Python, compiled by Numba, and kept as other kernels are.

A kernel is one task for SHARE numbers. Their bits do not depend on the number of threads, nor on
what a kernel computes besides: arithmetic is as written, in the order of the formula.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from pyggml.formulas.formula import Formula
from pyggml.formulas.text import define, define_function, float32_python
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import BF16, F32, DType
from pyggml.jit import JIT, Code, kernel, simd, types
from pyggml.jit.decorators import apart
from pyggml.jit.tasks import SHARE, launch, pieces, tuple_stage, whole
from pyggml.kernels.kernel import Site, as_rows
from pyggml.quants.bits import bf16_to_float, float_to_bf16

FUNCTIONS = {
    "sqrt": "np.sqrt({0})",
    "log": "np.log({0})",
    "exp": "whole_exp32({0})",
    "expm1": "expm1_32({0})",
    "sin": "np.sin({0})",
    "cos": "np.cos({0})",
    "tanh": "tanh32({0})",
    "sigmoid": "sigmoid32({0})",
    "softplus": "softplus32({0})",
    "erfc": "erfc32({0})",
    "floor": "np.floor({0})",
    "ceil": "np.ceil({0})",
    "trunc": "np.trunc({0})",
    "pick": "_{0}[np.intp({1})]",  # in rows.py
}
PYTHON = float32_python(FUNCTIONS)
NAMES = {name: getattr(simd, name) for name in simd.__all__}
NAMES |= {"np": np, "f4": np.float32, "__name__": __name__}
NAMES |= {"bf16_to_float": bf16_to_float, "float_to_bf16": float_to_bf16}
_LOADS, STORES = {BF16: "bf16_to_float(_{0}[i])"}, {BF16: "float_to_bf16({0})"}
Kinds = tuple[DType, ...]


def loop_text(name: str, formula: Formula, kinds: Kinds = (), of_results: Kinds = ()) -> str:
    """The function name(results, _source …, settings): it computes all elements of 1-d arrays.

    kinds, of_results: the types of sources and results; F32 if there are none
    """
    kinds = kinds or (F32,) * len(formula.sources)
    of_results = of_results or (F32,) * len(formula.results)
    results = [f"_y{i}" for i in range(len(formula.results))]
    sources = [f"_{s}" for s in formula.sources]
    loads = [
        f"{s} = " + _LOADS.get(kind, "_{0}[i]").format(s)
        for s, kind in zip(formula.sources, kinds, strict=True)
    ]
    statements, values = PYTHON.lines(formula.results)
    stores = [
        f"{y}[i] = " + STORES.get(kind, "{0}").format(value)
        for y, value, kind in zip(results, values, of_results, strict=True)
    ]
    body = "".join(f"        {line}\n" for line in (*loads, *statements, *stores))
    head = f"def {name}({', '.join((*results, *sources, *formula.settings))}):\n"
    return f"{head}    for i in range(_y0.size):\n{body}"


def _task_text(
    loop: str, n_arrays: int, settings: Sequence[str], values: Sequence[str] = ()
) -> str:
    """The task that gives the loop its share of the arrays, which are the first arguments. values:
    of the loop's settings, where those of the task are no numbers"""
    arrays = [f"a{i}" for i in range(n_arrays)]
    shares = [f"{a}[start : start + {SHARE}]" for a in arrays]
    return (
        f"def {loop}_task(arguments, task, thread):\n"
        f"    {', '.join((*arrays, *settings))}, = arguments[0]\n"
        f"    start = task * {SHARE}\n"
        f"    {loop}({', '.join((*shares, *(values or settings)))})\n"
    )


def _rows_text(loop: str) -> str:
    """The task for `per` rows of y and a, each with the next row of b, over and over."""
    return (
        f"def {loop}_task(arguments, task, thread):\n"
        "    y, a, b, per = arguments[0]\n"
        "    for r in range(task * per, min(task * per + per, y.shape[0])):\n"
        f"        {loop}(y[r], a[r], b[r % b.shape[0]])\n"
    )


@cache
def loop_of(formula: Formula, kinds: Kinds, of_results: Kinds = ()) -> Callable[..., Any]:
    """The loop as plain Python."""
    name = f"{formula.name}_values"  # not that of a function it calls
    return define(loop_text(name, formula, kinds, of_results), name, NAMES)


def compiled_loop(
    formula: Formula, kinds: Kinds, fuses: bool = False, of_results: Kinds = ()
) -> Any:
    """The loop that tasks call. Its name says what its text is."""
    text = loop_text("", formula, kinds, of_results)
    name = f"{formula.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return apart(define(loop_text(name, formula, kinds, of_results), name, NAMES), fuses)


def _code(loop: Any, text: str, *takes: Any) -> Code:
    """The task of this text, which calls the loop and reads a tuple of these types."""
    name = loop.__name__
    task = define(text, f"{name}_task", {**NAMES, name: loop})
    return Code(task, types.void(types.CPointer(types.Tuple(takes)), types.intp, types.intp))


@cache
def code_of(formula: Formula, kinds: Kinds, of_results: Kinds = ()) -> Code:
    """The task, whose machine code reads a tuple: results, sources, of these types, settings."""
    of_results = of_results or (F32,) * len(formula.results)
    loop, every = compiled_loop(formula, kinds, of_results=of_results), (*of_results, *kinds)
    text = _task_text(loop.__name__, len(every), formula.settings)
    items = (types.uint16 if kind is BF16 else types.float32 for kind in every)
    arrays = [types.Array(item, 1, "C") for item in items]
    return _code(loop, text, *arrays, *[types.float32] * len(formula.settings))


@cache
def _rows_code(formula: Formula) -> Code:
    loop = compiled_loop(formula, (F32, F32))
    rows = types.Array(types.float32, 2, "C")
    return _code(loop, _rows_text(loop.__name__), rows, rows, rows, types.intp)


@cache
def inline_formula(of: Formula, compiled: Callable[[Callable], Any] = kernel) -> Any:
    """A function for other kernels: of one number of each source, then the settings."""
    arguments = (*of.sources, *of.settings)
    return compiled(define_function(PYTHON, f"{of.name}_formula", arguments, of.results, NAMES))


def by_formula(formula: Formula) -> Callable[[Site], Call]:
    """What binds a formula's kernel to a node whose sources all have as many elements."""

    def run(site: Site) -> Call:
        arrays = [a.reshape(-1) for a in (site.out, *site.saved, *site.src)]
        settings = [np.float32(site.node.params[name]) for name in formula.settings]
        kinds = tuple(s.dtype for s in site.node.src)
        of_results = tuple(t.dtype for t in (site.node, *site.node.saved))
        if not JIT:
            return Call(loop_of(formula, kinds, of_results), *arrays, *settings)
        n_shares = -(-site.out.size // SHARE)
        n = len(arrays) - len(kinds)
        touches = [pieces(a, SHARE, i >= n) for i, a in enumerate(arrays)]
        values, code = (*arrays, *settings), code_of(formula, kinds, of_results)
        return Call(launch, tuple_stage(code, values, n_shares, None, touches))

    return run


@cache
def _step_code(of: Formula) -> Code:
    """The task of `by_step`; its tuple: p, moments, sources, settings."""
    loop = compiled_loop(of, (F32,) * len(of.sources), fuses=True)
    n = len(of.results) + len(of.sources)
    values = [f"s[{i}]" for i in range(len(of.settings))]
    takes = [types.Array(types.float32, 1, "C")] * (n + 1)
    return _code(loop, _task_text(loop.__name__, n, ["s"], values), *takes)


def by_step(of: Formula) -> Callable[[Site], Call]:
    """What binds an optimiser's step to a node: of a parameter and moments, the sources from the
    third on, in their own memory. The last source holds the settings, which each run reads anew."""

    def run(site: Site) -> Call:
        *sources, settings = (a.reshape(-1) for a in site.src)
        arrays = (site.out.reshape(-1), *sources[2:], *sources)
        if not JIT:
            loop = loop_of(of, (F32,) * len(sources))
            return Call(lambda *given: loop(*given[:-1], *given[-1]), *arrays, settings)
        n = len(sources) - 1
        touches = [pieces(a, SHARE, i >= n) for i, a in enumerate(arrays)]
        n_shares, frame = -(-site.out.size // SHARE), (*arrays, settings)
        return Call(
            launch, tuple_stage(_step_code(of), frame, n_shares, None, [*touches, whole(settings)])
        )

    return run


def by_rows(formula: Formula, site: Site) -> Call:
    """The formula of two sources, where row r of the first takes row r % m of the second's m."""
    y, a, b = arrays = [as_rows(x) for x in (site.out, *site.src)]
    if not JIT:
        loop = loop_of(formula, (F32, F32))
        return Call(one_by_one, [Call(loop, y[r], a[r], b[r % len(b)]) for r in range(len(y))])
    per = max(1, SHARE // max(1, y.shape[1]))
    touches = (pieces(y, per), pieces(a, per, True), whole(b))
    n_tasks = -(-len(y) // per)
    return Call(launch, tuple_stage(_rows_code(formula), (*arrays, per), n_tasks, None, touches))
