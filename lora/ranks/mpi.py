"""Ranks over MPI.

Every exchange is begun and then asked after, not waited for: signals are heard meanwhile, and a
processor is left to ranks that still compute. An MPI moves a large message piece by piece, where it
has no way to read another process's memory 32 KB at a time, and only while it is asked: so what all
ranks are there for is asked after without a pause.
"""

import os
import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from pyggml.lora.ranks.exchanging import ExchangingRanks
from pyggml.lora.ranks.roll import Roll

_SHORTEST, _LONGEST = 20e-6, 2e-3  # seconds between two looks for a rank that may compute
_SHARE = 1 / 16  # of what it was waited for so far


class MpiRanks(ExchangingRanks):
    """All processes of MPI.COMM_WORLD. launcher: the words that start them, without their
    number."""

    leaves_time = False

    def __init__(self, launcher: Sequence[str] = ("mpiexec",)) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.launcher, self._roll = (*launcher, "-n", str(self.size)), Roll(self._comm)
        host = MPI.Get_processor_name()
        here = f"{host} {_processors()}"
        everywhere = self._texts(here)
        self.n_beside = everywhere.count(here)
        self._roll.hosts = [text.split(" ")[0] for text in everywhere]
        self.on_host = self._roll.hosts[: self.rank].count(host)

    @property
    def is_first(self) -> bool:
        return self.rank == self._roll.speaker

    def wait_at_most(self, seconds: float) -> None:
        super().wait_at_most(seconds)
        self._roll.limit = seconds

    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    def _gather(
        self, mine: np.ndarray, target: np.ndarray, counts: Sequence[int], pauses: bool = True
    ) -> None:
        self._wait(self._comm.Iallgatherv(mine, [target, list(counts)]), pauses)

    def _deal(
        self, sent: Sequence[Sequence[np.ndarray]], target: np.ndarray, counts: Sequence[int]
    ) -> None:
        pieces = [piece for each in sent for piece in each]
        sizes = [sum(piece.size for piece in each) for each in sent]
        numbers = np.concatenate([*pieces, np.empty(0, target.dtype)])
        self._wait(self._comm.Ialltoallv([numbers, sizes], [target, list(counts)]), pauses=False)

    def _wait(self, request: MPI.Request, pauses: bool) -> None:
        began = time.perf_counter()
        self._roll.begin()
        while not request.Test():
            waited = (time.perf_counter() - began) * _SHARE
            time.sleep(min(max(waited, _SHORTEST), _LONGEST) if pauses else 0)
            self._roll.look()


def _processors() -> str:
    """Those that the launcher gave this process."""
    try:
        return str(sorted(os.sched_getaffinity(0)))  # not on macOS and Windows
    except AttributeError:
        return "all"
