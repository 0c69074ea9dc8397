"""Which steps wait for which: found from the memory that each of them reads and writes.

A step that reads a byte waits for the last step before it that wrote the byte. A step that writes a
byte waits for that one too, and for all steps that have read the byte since. Steps that wait for
each other neither directly nor through others may run at the same time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes from the address `first` to the one before `last`."""

    first: int
    last: int

    def meets(self, other: Range) -> bool:
        return self.first < other.last and other.first < self.last


class StepAccess(NamedTuple):
    """What a step reads and writes. A range that it may read or write counts as written."""

    reads: Sequence[Range]
    writes: Sequence[Range]


def conflict(a: StepAccess, b: StepAccess) -> bool:
    """Whether the order of two steps matters: one of them writes what the other touches."""
    return any(w.meets(r) for w in a.writes for r in (*b.reads, *b.writes)) or any(
        w.meets(r) for w in b.writes for r in a.reads
    )


Waits = list[tuple[int, ...]]


def waits(steps: Iterable[StepAccess]) -> Waits:
    """For each step, the numbers of the earlier ones that it waits for.

    Those that one of the others waits for anyway are left out.
    """
    memory, of_steps = _Memory(), []
    before: list[int] = []  # of each step, bits of all steps that end before it begins
    for i, step in enumerate(steps):
        kept, seen = [], 0
        for j in sorted(memory.conflicts(i, step), reverse=True):
            if not seen >> j & 1:
                kept.append(j)
                seen |= before[j] | 1 << j
        before.append(seen)
        of_steps.append(tuple(reversed(kept)))
    return of_steps


@dataclass(slots=True)
class _Use:
    """The last writer of some bytes, -1 if there is none, and their readers since."""

    writer: int = -1
    readers: set[int] = field(default_factory=set)


class _Memory:
    """The uses of all bytes: those from `starts[k]` to `starts[k + 1]` have the use `uses[k]`."""

    def __init__(self) -> None:
        self._starts: list[int] = [-1]
        self._uses = [_Use()]

    def conflicts(self, i: int, step: StepAccess) -> set[int]:
        """The earlier steps that must end before step i: for the bytes that it reads their writers,
        for those that it writes their readers too. Step i is entered as a user of all."""
        numbers: set[int] = set()
        for first, last in step.reads:
            for k in range(self._cut(first), self._cut(last)):
                numbers.add(self._uses[k].writer)
                self._uses[k].readers.add(i)
        for first, last in step.writes:
            here, there = self._cut(first), self._cut(last)
            for use in self._uses[here:there]:
                numbers |= use.readers | {use.writer}
            if here < there:
                self._starts[here:there] = [first]
                self._uses[here:there] = [_Use(i)]
        return numbers - {i, -1}

    def _cut(self, address: int) -> int:
        """The number of the piece that begins at this address, after a cut there."""
        k = bisect_left(self._starts, address)
        if k == len(self._starts) or self._starts[k] != address:
            use = self._uses[k - 1]
            self._starts.insert(k, address)
            self._uses.insert(k, _Use(use.writer, set(use.readers)))
        return k
