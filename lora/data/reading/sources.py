"""A file of rows: where it is, how often its rows are read, what was found in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyggml.errors import DataError
from pyggml.lora.data.reading.files import RowFaults
from pyggml.lora.data.tokens.documents import Notes

MOST_WEIGHT = 1000.0
_WEIGHTED = re.compile(r"(?s)(.+):((?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and how often each of its rows is read in an epoch.

    A weight of 2 reads every row twice, one of 0.5 every row in every second epoch.

    rows: those of a program, which stand in no file; sentences then call them by `path`
    """

    path: Path
    weight: float = 1.0
    rows: Iterable[Any] | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(given: str | os.PathLike[str] | Source) -> Source:
        """`a.jsonl:2` is a.jsonl with the weight 2; a Path is never cut.

        What stands after the last colon is a weight if it is a number, else part of the path, so
        that of a file named `a:2` the weight is written too: `a:2:1`. Raises DataError for what is
        no path, and for a weight that is not above 0 or more than MOST_WEIGHT.
        """
        if isinstance(given, Source):
            return given
        if not isinstance(given, str | os.PathLike):
            raise DataError(f"{given!r:.60} is no file; `corpus` takes rows of a program")
        parts = _WEIGHTED.fullmatch(given) if isinstance(given, str) else None
        if parts is None:
            return Source(Path(given))
        weight = float(parts[2])
        if not 0 < weight <= MOST_WEIGHT:
            raise DataError(
                f"{given}: the weight {parts[2][:20]} is out of range, wanted above 0 and at most "
                f"{MOST_WEIGHT:g}"
            )
        return Source(Path(parts[1]), weight)


File = str | os.PathLike[str] | Source


@dataclass(frozen=True, slots=True)
class FileSummary:
    """The rows found in a file: documents made of them, documents held out, and faulty rows
    skipped.

    was_kept   whether its tokens are those of an earlier run
    not_kept   the reason why the next run must make them anew; "" if it need not
    notes      remarks on its documents for the user
    n_dropped  rows left out because they are longer than a window
    n_truncated  rows of which the first tokens alone fit into one
    """

    source: Source
    kind: str
    n_documents: int
    n_held_out: int
    n_tokens: int
    skipped: RowFaults = field(default_factory=RowFaults)
    was_kept: bool = False
    not_kept: str = ""
    notes: Notes = field(default_factory=dict)
    n_dropped: int = 0
    n_truncated: int = 0
