"""Formula: a Python function of numbers, traced once, and the formulas of its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from pyggml.formulas.expression import Expression, number, parts_of, rebuild, symbol
from pyggml.formulas.numbers import numpy_function
from pyggml.formulas.rows import KEPT, LENGTH, PLACE, Rows, reductions_in
from pyggml.formulas.slopes import slope_of

RESULT, GRADIENT = "y", "dy"


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """Numbers computed of one number of each source, and of settings that all elements share.

    results    the first is the value; a kernel may write more
    shared     sources that are one row, which all rows share
    single     sources that have one number for each row, or one for all
    tiled      sources, single ones too, that are repeated as tiles over three axes of rows
    """

    name: str
    sources: tuple[str, ...]
    settings: tuple[str, ...]
    results: tuple[Expression, ...]
    shared: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    tiled: tuple[str, ...] = ()

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
    def along(self) -> list[str]:
        """The sources that have rows of numbers."""
        return [s for s in self.sources if s not in self.single]

    @property
    def rows(self) -> Rows:
        return _rows_along(*self.along)

    def differs(self, result: int) -> bool:
        """Whether a result has rows of numbers, not one number for each row."""
        return self.rows.differs(self.results[result])

    def reads(self, *values: Expression) -> list[str]:
        """Which numbers of an element these are made of: sources, its place, what is kept of it."""
        of_element = str(PLACE.value), str(KEPT.value)
        return [s for s in (*self.along, *of_element) if s in _symbols(*values)]

    @property
    def picks(self) -> set[str]:
        """The sources that are places of numbers which are picked out of a row."""
        places = (e.operands[1] for e in parts_of(*self.results) if e.operation == "pick")
        return _symbols(*places)

    def __call__(self, *sources: np.ndarray, **settings: float) -> np.ndarray:
        """The value in float64: the meaning of the formula, and the reference of every kernel."""
        given = dict(zip(self.sources, sources, strict=True))
        numbers: list[Any] = [settings[name] for name in self.settings]
        if self.of_rows:
            n = np.shape(given[self.along[0]])[-1]
            numbers += [np.float64(n), np.arange(n)]
        rows = given[self.along[0]].shape[:-1] if self.tiled else ()
        arrays = (
            np.tile(a, (*np.floor_divide(rows, a.shape[:-1]), 1))
            if s in self.tiled
            else a[..., None]
            if s in self.single
            else a
            for s, a in given.items()
        )
        return np.asarray(_value(self)(*arrays, *numbers))

    def without(self, name: str, **values: float) -> Formula:
        """The same, by another name, where these sources are numbers."""
        numbers = {symbol(s): number(value) for s, value in values.items()}
        names = (
            tuple(s for s in names if s not in values)
            for names in (self.sources, self.shared, self.single, self.tiled)
        )
        sources, shared, single, tiled = names
        results = tuple(rebuild(self.results, numbers))
        return Formula(name, sources, self.settings, results, shared, single, tiled)

    def of(self, **names: str) -> Formula:
        """The same with other sources in place of these."""
        new = {symbol(old): symbol(name) for old, name in names.items()}
        sources = tuple(names.get(s, s) for s in self.sources)
        return replace(self, sources=sources, results=tuple(rebuild(self.results, new)))


@cache
def _rows_along(*sources: str) -> Rows:
    """One for all formulas with these sources, not made anew whenever one is bound."""
    return Rows(sources)


@cache
def _value(of: Formula) -> Callable[..., Any]:
    of_row = (str(LENGTH.value), str(PLACE.value)) if of.of_rows else ()
    return numpy_function(of.result, (*of.sources, *of.settings, *of_row))


def formula(
    function: Callable[..., Any],
    shared: tuple[str, ...] = (),
    single: tuple[str, ...] = (),
    tiled: tuple[str, ...] = (),
) -> Formula:
    """The formula of a function: its positional arguments are sources, its keywords settings, what
    it returns the result or a tuple of several.

    shared, single, tiled: names of sources, see Formula
    """
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    for name, argument in inspect.signature(function).parameters.items():
        by_kind[argument.kind is argument.KEYWORD_ONLY].append(name)
    sources, settings = by_kind[False], by_kind[True]
    value = function(*map(symbol, sources), **{name: symbol(name) for name in settings})
    results = value if isinstance(value, tuple) else (value,)
    name = function.__name__.strip("_")
    return Formula(name, tuple(sources), tuple(settings), results, shared, single, tiled)


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
    single = of.single if of.rows.differs(of.result) else (*of.single, GRADIENT)
    along = (*of.along, GRADIENT) if single is of.single else of.along
    dx = Rows(along).gradient(of.result, symbol(source), symbol(GRADIENT))
    reads = [s for s in of.sources if s in _symbols(dx)]
    return Formula(name, (*reads, GRADIENT), of.settings, (dx,), of.shared, single)


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
    shared = dict.fromkeys(s for f in formulas for s in f.shared)
    single = dict.fromkeys(s for f in formulas for s in f.single)
    tiled = dict.fromkeys(s for f in formulas for s in f.tiled)
    of_rows = tuple(shared), tuple(single), tuple(tiled)
    return Formula(name, tuple(sources), tuple(settings), results, *of_rows)


def _symbols(*roots: Expression) -> set[str]:
    return {str(part.value) for part in parts_of(*roots) if part.operation == "symbol"}
