"""What a group of ranks can do, for a group of one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pyggml.errors import PyggmlError


class RankLostError(PyggmlError):
    """A rank that has ended, or kept the others waiting for too long: the run ends without it."""


class Ranks:
    """A group of processes, seen by one of them; this class is a process alone.

    rank        number of this process, from 0
    size        number of processes
    n_beside    of those, the number that share this one's processors
    on_host     number of this process among those on its host, from 0
    launcher    the words before a command line that start such a group
    leaves_time whether a rank that is told to end has the time for the step under way
    limit       seconds for which a rank waits for others
    """

    rank: int = 0
    size: int = 1
    n_beside: int = 1
    on_host: int = 0
    launcher: Sequence[str] = ()
    leaves_time: bool = True
    limit: float = 1800.0

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def wait_at_most(self, seconds: float) -> None:
        """Have a wait for other ranks that takes longer end in RankLostError."""
        self.limit = seconds

    def share(self, n: int) -> range:
        """This rank's of n batches: consecutive ones, the first rank has the first."""
        return share(n, self.rank, self.size)

    # All ranks call the following alike and in the same order.

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def join(self, rows: np.ndarray, n: int) -> np.ndarray:
        """The rows of n batches, in their order. rows: (len(share(n)), k), of this rank's."""
        return rows

    def add(self, gradients: Sequence[np.ndarray], n: int, size: int) -> np.ndarray:
        """(size,): 0 + g₁ + g₂ + … + gₙ in this order, of a step's batches; g₁ if n is 1.

        gradients: (size,) float32 each, of this rank's share of the n.
        """
        if n == 1:
            return gradients[0]
        total = np.zeros(size, np.float32)
        for gradient in gradients:
            total += gradient
        return total

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A context whose error is that of all ranks: the others raise it in their next exchange,
        which this one would come to as well."""
        yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context at whose end every rank raises PyggmlError if one of them has raised an
        error inside."""
        yield

    def texts(self, text: str) -> list[str]:
        """A text of each rank, in their order."""
        return [text]

    # These are for one rank by itself.

    def look(self) -> None:
        """Raise RankLostError if another rank has ended, PyggmlError if it has failed, where that
        can be told: for one that waits for numbers which come by another way."""

    def abort(self, code: int) -> None:
        """End all ranks at once, where this one ends in a way that the others cannot know."""


def share(n: int, rank: int, size: int) -> range:
    """A rank's share of n batches, of `size` ranks."""
    return range(n * rank // size, n * (rank + 1) // size)


ALONE = Ranks()
