"""Formula: a Python function of numbers, traced once, and the formulas of its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from pyggml.formulas.expression import Expression, parts_of, rebuild, symbol
from pyggml.formulas.numbers import numpy_function
from pyggml.formulas.rows import Rows, reductions_in
from pyggml.formulas.slopes import slope_of

RESULT, GRADIENT = "y", "dy"


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """Numbers computed of one number of each source, and of settings that all elements share.

    results    the first is the value; a kernel may write more
    shared     sources that are one row, which all rows share
    """

    name: str
    sources: tuple[str, ...]
    settings: tuple[str, ...]
    results: tuple[Expression, ...]
    shared: tuple[str, ...] = ()

    @property
    def result(self) -> Expression:
        return self.results[0]

    @property
    def signature(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the sources and of the settings."""
        return self.sources, self.settings

    @property
    def of_rows(self) -> bool:
        """Whether a number is made of all numbers of its row."""
        return bool(reductions_in(*self.results))

    @property
    def rows(self) -> Rows:
        return Rows(self.sources)

    def sources_of(self, *values: Expression) -> list[str]:
        """The sources that these read."""
        return [s for s in self.sources if s in _symbols(*values)]

    def __call__(self, *sources: np.ndarray, **settings: float) -> np.ndarray:
        """The value in float64: the meaning of the formula, and the reference of every kernel."""
        numbers = [settings[name] for name in self.settings]
        if self.of_rows:
            numbers.append(np.shape(sources[0])[-1])
        return np.asarray(_value(self)(*sources, *numbers))

    def of(self, **names: str) -> Formula:
        """The same with other sources in place of these."""
        new = {symbol(old): symbol(name) for old, name in names.items()}
        sources = tuple(names.get(s, s) for s in self.sources)
        return replace(self, sources=sources, results=tuple(rebuild(self.results, new)))


@cache
def _value(of: Formula) -> Callable[..., Any]:
    length = ("n",) if of.of_rows else ()
    return numpy_function(of.result, (*of.sources, *of.settings, *length))


def formula(function: Callable[..., Any], shared: tuple[str, ...] = ()) -> Formula:
    """The formula of a function: its positional arguments are sources, its keywords settings.

    shared: names of sources that are one row, which all rows share
    """
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    for name, argument in inspect.signature(function).parameters.items():
        by_kind[argument.kind is argument.KEYWORD_ONLY].append(name)
    sources, settings = by_kind[False], by_kind[True]
    result = function(*map(symbol, sources), **{name: symbol(name) for name in settings})
    name = function.__name__.strip("_")
    return Formula(name, tuple(sources), tuple(settings), (result,), shared)


def gradient_formula(name: str, of: Formula, source: str) -> Formula:
    """dy · the slope by a source, which is the number 0 where the slope is.

    Its sources are those that the slope reads, then dy; the result y alone where that is enough,
    as for e^x or c · tanh(x / c).
    """
    if of.of_rows:
        return _gradient_of_rows(name, of, source)
    slope = slope_of(of.result, symbol(source))
    (of_result,) = rebuild([slope], _told_by_result(of))
    if not _symbols(of_result) & {*of.sources}:
        slope = of_result
    reads = [s for s in (*of.sources, RESULT) if s in _symbols(slope)]
    return Formula(name, (*reads, GRADIENT), of.settings, (symbol(GRADIENT) * slope,))


def _gradient_of_rows(name: str, of: Formula, source: str) -> Formula:
    """Of a source that is no row which all share."""
    dx = Rows((*of.sources, GRADIENT)).gradient(of.result, symbol(source), symbol(GRADIENT))
    reads = [s for s in of.sources if s in _symbols(dx)]
    return Formula(name, (*reads, GRADIENT), of.settings, (dx,), of.shared)


def _told_by_result(of: Formula) -> dict[Expression, Expression]:
    """What the result y is, and, where y is a product with a setting, its other factor."""
    y = symbol(RESULT)
    parts = {of.result: y}
    if of.result.operation == "*":
        a, b = of.result.operands
        parts |= {p: y / q for p, q in ((a, b), (b, a)) if _symbols(q) <= {*of.settings}}
    return parts


def joint(name: str, formulas: Iterable[Formula]) -> Formula:
    """One formula with the results of several, of all their sources."""
    formulas = list(formulas)
    sources = dict.fromkeys(s for f in formulas for s in f.sources)
    settings = dict.fromkeys(s for f in formulas for s in f.settings)
    results = tuple(r for f in formulas for r in f.results)
    return Formula(name, tuple(sources), tuple(settings), results)


def _symbols(*roots: Expression) -> set[str]:
    return {str(part.value) for part in parts_of(*roots) if part.operation == "symbol"}
