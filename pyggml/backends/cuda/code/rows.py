"""Kernels of formulas with reductions: the threads of a block, or a warp, share a row.

Where a row is held, it is read once: each thread has it in registers, in fours. A source that no
reduction reads is loaded where the results are stored. Rows that are not held are read once for
each pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import fours, ptx
from pyggml.backends.cuda.code.blocks import block_max, block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import EXACT, NAMES
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.launches import THREADS
from pyggml.formulas.expression import Expression, number, rebuild, symbol
from pyggml.formulas.formula import Formula
from pyggml.formulas.rows import SUMS, Pass
from pyggml.formulas.text import define

FEW_FOURS = 2  # of a thread, which has registers for what the results alone read
_NAMES = {**NAMES, "cuda": cuda, "np": np, "THREADS": THREADS, "__name__": __name__}
_NAMES |= {"follow": follow}
_NAMES |= {f.__name__: f for f in (block_max, block_sum, first_row, rows_apart)}
_NAMES |= {name: getattr(fours, name) for name in ("load_four", "load_four_bf16", "store_four")}
_NAMES |= {"put_four_bf16": ptx.put_four_bf16}
_START = {"sum": "f4(0)", "wide_sum": "np.float64(0)", "largest": "f4(-np.inf)"}
_ADD = dict.fromkeys(SUMS, "{0} += {1}") | {"largest": "{0} = max({0}, {1})"}
_JOIN = {"sum": "block_sum({0}, parts)", "largest": "block_max({0}, parts)"}
_JOIN |= {"wide_sum": "f4(block_sum({0}, wide_parts))"}
_AXES = (
    "b, h = row // (axes[1] * axes[2]), row // axes[2] % axes[1]",
    "q = row % axes[2]",
)
_TILE = (
    "{0}_row = ((b % {0}_axes[0]) * {0}_axes[1] + h % {0}_axes[1]) * {0}_axes[2] + q % {0}_axes[2]"
)
_IS_THERE = (
    "if cuda.threadIdx.x == 0 and not f4(0) <= {0} < f4(size):",
    "    cuda.atomic.max(fault, 0, number)",
)


class Row(NamedTuple):
    """A formula with reductions, and how its kernel has a row.

    fours    that a thread holds; 0 if rows are not held
    in_bf16  names of the results, y0 and so on, and of the arrays that are BF16; of rows held
    loads    sources that are sums of two arrays: their names
    totals   names of results that are added up over the rows of those threads that share one, and
             written at the end; of rows held
    """

    formula: Formula
    fours: int = 0
    in_bf16: frozenset[str] = frozenset()
    loads: tuple[tuple[str, tuple[str, str]], ...] = ()
    totals: tuple[str, ...] = ()

    @property
    def results(self) -> list[str]:
        return [f"y{i}" for i in range(len(self.formula.results))]

    @property
    def fault(self) -> tuple[str, ...]:
        return ("fault", "number") if self.formula.picks else ()

    def arrays_of(self, source: str) -> tuple[str, ...]:
        return dict(self.loads).get(source, (source,))

    def place(self, source: str, at: str) -> str:
        """Where element `at` of a row lies."""
        if source in self.formula.tiled:
            return f"{source}_row * size + {at}"
        return at if source in self.formula.shared else f"at + {at}"

    @property
    def axes(self) -> tuple[str, ...]:
        """Arguments: three axes of rows, and those of each source that is repeated over them."""
        tiled = self.formula.tiled
        return ("axes", *(f"{s}_axes" for s in tiled)) if tiled else ()


@cache
def row_kernel(row: Row) -> Any:
    """kernel(results …, arrays …, settings …, size), where a row has so many numbers; then the cell
    and the number of the fault that none is at a place, if the formula picks some, and `axes`."""
    of = row.formula
    arrays = [a for s in of.sources for a in row.arrays_of(s)]
    named = [f"_{name}" for name in (*row.results, *arrays)]  # a source's own name is its element's
    passes = list(of.rows.passes(of.results))
    is_last = 0 < row.fours <= FEW_FOURS  # whether the last pass finds what it reads in registers
    read = of.reads(
        *(value for step in passes[: len(passes) - (not is_last)] for value in step.values)
    )
    held = [s for s in read if s in of.along] if row.fours else []
    body = [*_AXES, *(_TILE.format(s) for s in of.tiled)] if of.tiled else []
    body += [
        f"{s} = f4(_{s}[{f'{s}_row' if s in of.tiled else f'row % _{s}.size'}])" for s in of.single
    ]
    body += [line.format(s) for s in sorted(of.picks) for line in _IS_THERE]
    if row.fours:
        body += _reads(row, held)
    body += [line for step in passes for line in _lines(row, step, held)]
    is_wide = any(how == "wide_sum" for step in passes for how, _ in step.sums)
    text = [
        f"def {of.name}_rows({', '.join((*named, *of.settings, 'size', *row.fault, *row.axes))}):",
        "    parts = cuda.shared.array(THREADS, np.float32)",
        *("    wide_parts = cuda.shared.array(THREADS, np.float64)" for _ in range(is_wide)),
        *(f"    {s}_held = cuda.local.array({4 * row.fours}, np.float32)" for s in held),
        *(f"    {line}" for line in _no_totals(row)),
        "    follow()",
        "    n = f4(size)",
        f"    n_rows = _{row.arrays_of(of.along[0])[0]}.size // size",
        "    for row in range(first_row(), n_rows, rows_apart()):",
        "        at = row * size",
        *(f"        {line}" for line in body),
        *(f"    {line}" for line in _stores_of_totals(row)),
    ]
    return follower(kernel(define("\n".join(text), f"{of.name}_rows", _NAMES)))


def _lines(row: Row, step: Pass, held: Sequence[str]) -> Iterator[str]:
    """A pass: what a row has in common, the loop, and what the threads join."""
    statements, values = EXACT.lines([value for _, value in step.common])
    yield from statements
    yield from (f"{c} = {v}" for (c, _), v in zip(step.common, values, strict=True))
    yield from (f"{s} = {_START[how]}" for how, s in step.sums)
    apart = [] if step.sums else [i for i, v in enumerate(step.values) if not _differs(row, v)]
    if apart:  # one number for a row
        statements, values = EXACT.lines([step.values[i] for i in apart])
        yield "if cuda.threadIdx.x == 0:"
        stores = (f"_y{i}[row] = {v}" for i, v in zip(apart, values, strict=True))
        yield from (f"    {line}" for line in (*statements, *stores))
    if len(apart) < len(step.values):
        yield from (_held_loop if row.fours else _strided_loop)(row, step, held)
    yield from (f"{s} = {_JOIN[how].format(s)}" for how, s in step.sums)


def _differs(row: Row, value: Expression) -> bool:
    return row.formula.rows.differs(value)


def _element(row: Row, step: Pass, names: Mapping[str, str]) -> Iterator[str]:
    """What one element of a pass takes, and adds.  names: of its values where they are stored"""
    yield from (f"{s} = {names[s]}" for s in row.formula.reads(*step.values))
    statements, values = EXACT.lines(step.values)
    yield from statements
    for i, value in enumerate(values):
        if step.sums:
            how, s = step.sums[i]
            yield _ADD[how].format(s, value)
        elif _differs(row, step.values[i]):
            yield f"{names[f'y{i}']} = {value}"


def _strided_loop(row: Row, step: Pass, held: Sequence[str]) -> Iterator[str]:
    yield "for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):"
    names = {y: f"_{y}[at + i]" for y in row.results}
    names |= {s: f"_{s}[{row.place(s, 'i')}]" for s in row.formula.along}
    names["place"] = "f4(np.int32(i))"
    yield from (f"    {line}" for line in _element(row, step, names))


# -- rows that are held ---------------------------------------------------------------------------

_EACH_FOUR = (
    "for four in range({fours}):",
    "    j = 4 * (cuda.threadIdx.x + four * cuda.blockDim.x)",
)


def _load(row: Row, source: str) -> list[str]:
    """Statements that make source_0 to source_3 the four numbers from place j on."""
    lines = []
    for name, array in zip(("", "more_"), row.arrays_of(source), strict=False):
        of = ", ".join(f"{name}{source}_{i}" for i in range(4))
        load = "load_four_bf16" if array in row.in_bf16 else "load_four"
        lines.append(f"{of} = {load}(_{array}, {row.place(source, 'j')})")
    if len(lines) > 1:
        lines += [f"{source}_{i} += more_{source}_{i}" for i in range(4)]
    return lines


def _reads(row: Row, held: Sequence[str]) -> Iterator[str]:
    """The thread's fours of a row, zeros behind its end."""
    yield from (line.format(fours=row.fours) for line in _EACH_FOUR)
    for s in held:
        yield f"    {s}_0 = {s}_1 = {s}_2 = {s}_3 = f4(0)"
    yield "    if j < size:"
    yield from (f"        {line}" for s in held for line in _load(row, s))
    yield from (f"    {s}_held[4 * four + {i}] = {s}_{i}" for s in held for i in range(4))


def _held_loop(row: Row, step: Pass, held: Sequence[str]) -> Iterator[str]:
    """A pass over what a thread holds: behind the end of a row as well, where that adds nothing."""
    here = {s: f"{s}_held[i]" for s in held} | {"place": "f4(np.int32(j + (i & 3)))"}
    zero = {symbol(s): number(0) for s in row.formula.along}
    adds_nothing = all(value is number(0) for value in rebuild(step.values, zero))
    only_sums = all(how in SUMS for how, _ in step.sums)
    if step.sums and adds_nothing and only_sums:
        yield f"for i in range({4 * row.fours}):"
        yield from (f"    {line}" for line in _element(row, step, here))
        return
    yield from (line.format(fours=row.fours) for line in _EACH_FOUR)
    yield "    if j < size:"
    if step.sums:
        yield "        for i in range(4 * four, 4 * four + 4):"
        yield from (f"            {line}" for line in _element(row, step, here))
        return
    loaded = [s for s in row.formula.reads(*step.values) if s not in (*held, "place")]
    yield from (f"        {line}" for s in loaded for line in _load(row, s))
    for i in range(4):
        names = {s: f"{s}_held[4 * four + {i}]" for s in held} | {s: f"{s}_{i}" for s in loaded}
        names |= {y: f"{y}_{i}" for y in row.results} | {"place": f"f4(np.int32(j + {i}))"}
        yield from (f"        {line}" for line in _element(row, step, names))
    for y in (y for i, y in enumerate(row.results) if row.formula.differs(i)):
        store = "put_four_bf16" if y in row.in_bf16 else "store_four"
        if y in row.totals:
            yield from (f"        {y}_total[4 * four + {i}] += {y}_{i}" for i in range(4))
        else:
            yield f"        {store}(_{y}, at + j, {y}_0, {y}_1, {y}_2, {y}_3)"


def _no_totals(row: Row) -> Iterator[str]:
    for y in row.totals:
        yield f"{y}_total = cuda.local.array({4 * row.fours}, np.float32)"
        yield f"for i in range({4 * row.fours}):"
        yield f"    {y}_total[i] = f4(0)"


def _stores_of_totals(row: Row) -> Iterator[str]:
    """A row of sums of each that shares a block's threads."""
    for y in row.totals:
        yield from (line.format(fours=row.fours) for line in _EACH_FOUR)
        four = ", ".join(f"{y}_total[4 * four + {i}]" for i in range(4))
        yield "    if j < size:"
        yield f"        store_four(_{y}, first_row() * size + j, {four})"
