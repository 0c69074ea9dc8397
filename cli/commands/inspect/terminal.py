"""Sections on a terminal: within its width, and readable without colour."""

import sys
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from pyggml.cli.commands.inspect.sections import CellTable, ReportSection
from pyggml.cli.terminal.show import printable, say
from pyggml.cli.terminal.words import coloured_lines

_MANY = 7  # columns, from which on their names take several lines
_LABEL = 10


def say_sections(title: str, sections: Iterable[ReportSection]) -> None:
    console = Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    with console.capture() as shown:
        console.print(Text(printable(title), style="bold"))
        for section in sections:
            for part in _parts(section, console.width, console.color_system is not None):
                console.print(part)
    # Trailing blanks, which fill the tables, make long lines in files.
    say("\n".join(line.rstrip() for line in shown.get().splitlines()))


def _parts(section: ReportSection, width: int, has_colour: bool) -> Iterator[RenderableType]:
    yield Text()
    yield Text(section.title, style="bold cyan")
    if section.rows:
        yield _rows(section.rows)
    if section.table is not None and section.table.rows:
        yield from (_grid(part) for part in _narrow(section.table, width))
    if section.text:
        yield Text(printable(section.text))
    if section.words:
        yield from coloured_lines(section.words, width, has_colour)
    for note in section.notes:
        yield Text(printable(note), style="dim")


def _rows(rows: Iterable[tuple[str, str]]) -> Grid:
    grid = Grid.grid(padding=(0, 1))
    grid.add_column(min_width=_LABEL, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(printable(label)), Text(printable(text)))
    return grid


def _grid(table: CellTable) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for i, name in enumerate(_names(table)):
        right = i in table.right
        grid.add_column(Text(name), justify="right" if right else "left", no_wrap=right,
                        overflow="fold", header_style="bold")  # fmt: skip
    for row in table.rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def _names(table: CellTable) -> list[str]:
    if len(table.columns) < _MANY:
        return list(table.columns)
    return [name.replace("_", "\n").replace(" ", "\n") for name in table.columns]


def _narrow(table: CellTable, width: int) -> Iterator[CellTable]:
    """The table, or parts of it that fit, each with its first column."""
    names = _names(table)
    needed = [
        2 + max(len(s) for cell in (name, *(r[i] for r in table.rows)) for s in cell.split("\n"))
        for i, name in enumerate(names)
    ]
    if len(names) < _MANY:
        yield table
        return
    kept: list[int] = []
    for i in range(1, len(names)):
        if kept and needed[0] + sum(needed[c] for c in kept) + needed[i] > width:
            yield _part(table, [0, *kept])
            kept = []
        kept.append(i)
    yield _part(table, [0, *kept])


def _part(table: CellTable, columns: list[int]) -> CellTable:
    right = frozenset(at for at, c in enumerate(columns) if c in table.right)
    rows = [[row[c] for c in columns] for row in table.rows]
    return CellTable([table.columns[c] for c in columns], rows, right)
