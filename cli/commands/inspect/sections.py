"""What an inspection shows, in sections that a terminal and a page both know how to draw."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CellTable:
    """Rows of cells under named columns. right: the numbers of columns whose cells end flush."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A title, and below it what there is of: labelled lines, a table, a text as it is, notes.

    words      pieces of a text with their level, 0 to 8, or −1: a terminal colours them
    pictures   HTML, of a page alone
    folded     a page shows the section closed
    """

    title: str
    rows: Sequence[tuple[str, str]] = ()
    table: CellTable | None = None
    text: str = ""
    notes: Sequence[str] = ()
    words: Sequence[tuple[str, int]] = ()
    pictures: Sequence[str] = field(default=(), repr=False)
    folded: bool = False
