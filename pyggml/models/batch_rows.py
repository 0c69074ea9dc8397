"""The rows of a batch: texts, or windows of training, one after another in the tokens of a pass."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import concat, cont, get_rows, narrow

Once = Callable[[Hashable, Callable[[], Tensor]], Tensor]  # key, builder → what it built at first


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Which of a pass's tokens belong to which row.

    lengths   tokens of each row
    """

    lengths: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.lengths)

    def numbers(self, name: str, rows: Sequence[int] | None) -> list[int]:
        """The rows that are chosen, counted from the first, each once; None: all.

        Raises ShapeError, about the activation of this name, for one that there is not.
        """
        return _numbers(name, rows, self.n)

    def mask(self, name: str, rows: Sequence[int]) -> Tensor:
        """1 for each token of these rows and 0 for others, float32 (T, 1)."""
        return leaf(np.repeat(_column(_numbers(name, rows, self.n), self.n), self.lengths, axis=0))

    def start(self, row: int) -> int:
        """The number of the row's first token in the pass."""
        return sum(self.lengths[:row])

    def part(self, name: str, row: int) -> tuple[slice, ...]:
        """What of an activation is a row's: its tokens, and of a pattern what they read of it."""
        own = slice(self.start(row), self.start(row) + self.lengths[row])
        return (own, slice(None), own) if is_pattern(name) else (own,)

    def arrays(self, name: str, a: np.ndarray) -> list[np.ndarray]:
        """An activation's numbers, row by row."""
        return [np.ascontiguousarray(a[self.part(name, i)]) for i in range(self.n)]

    def cut(self, name: str, x: Tensor, row: int, once: Once) -> Tensor:
        """An activation x of one row, (tokens, …).

        It is cut by halves that rows share, so that the gradients of n rows add up in log n steps.
        """
        first, end = 0, self.n
        while end - first > 1:
            middle, before = (first + end) // 2, first
            first, end = (first, middle) if row < middle else (middle, end)
            at, n = self.start(first) - self.start(before), sum(self.lengths[first:end])
            x = once(("rows", x, first, end), partial(narrow, x, 0, at, n))
        if is_pattern(name) and self.n > 1:
            x = narrow(x, 2, self.start(row), self.lengths[row])
        return cont(x)

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The activation of all rows, of what `cut` gave of each or what became of it."""
        if is_pattern(name):
            parts = [self._among_others(p, i) for i, p in enumerate(parts)]
        joined = [*parts]
        while len(joined) > 1:  # by halves, too
            pairs = zip(joined[::2], joined[1::2], strict=False)
            last = joined[len(joined) // 2 * 2 :]
            joined = [*(concat(a, b, 0) for a, b in pairs), *last]
        return joined[0]

    def _among_others(self, pattern: Tensor, row: int) -> Tensor:
        """A row's pattern (tokens, heads, tokens) as what its tokens read of all the pass's."""
        before, n = self.start(row), self.lengths[row]
        unread = [before, sum(self.lengths) - before - n]
        zeros = [leaf(np.zeros((*pattern.shape[:2], m), np.float32)) for m in unread if m]
        sides = [*zeros[: bool(before)], pattern, *zeros[bool(before) :]]
        return reduce(concat, sides)


@dataclass(frozen=True, slots=True)
class Slots:
    """Which of n rows of a batch each token of a pass is of: an input of the pass, (T,) int32."""

    of: Tensor
    n: int

    def mask(self, name: str, rows: Sequence[int]) -> Tensor:
        """As `BatchRows.mask`."""
        return get_rows(leaf(_column(_numbers(name, rows, self.n), self.n)), self.of)


def _numbers(name: str, rows: Sequence[int] | None, n: int) -> list[int]:
    if wrong := [i for i in rows or () if not -n <= i < n]:
        raise ShapeError(f"{name}: there is no row {wrong[0]} in a batch of {n}")
    return [*dict.fromkeys(i % n for i in (range(n) if rows is None else rows))]


def _column(rows: list[int], n: int) -> np.ndarray:
    """(n, 1) float32, 1 in these rows."""
    column = np.zeros((n, 1), np.float32)
    column[rows] = 1
    return column


def by_text(batch: BatchRows | None, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """Activations by name, of a batch as lists, row by row."""
    return arrays if batch is None else {n: batch.arrays(n, a) for n, a in arrays.items()}


def is_pattern(name: str) -> bool:
    """Whether an activation is attention's pattern, whose last axis is tokens too."""
    return name.endswith("attn_pattern")
