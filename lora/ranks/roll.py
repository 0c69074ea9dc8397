"""Which ranks wait for the others, where one of them keeps them waiting."""

import atexit
import time

import numpy as np
from mpi4py import MPI

from pyggml.errors import first_names
from pyggml.lora.ranks.alone import RankLostError

_HEARERS = 8  # the first ranks: each with each would be too many connections
_MOST = 1.0  # seconds that count between two looks: a run that was suspended has lost nobody
_GRACE = 60.0  # seconds in which the speaker saves, tells and ends all
_FAILED = 2  # the exit code of all ranks


class Roll:
    """How long this rank waits in an exchange. At half of the limit it tells the first ranks that
    it is there; so these know at the limit who is not.

    limit     seconds
    hosts     the name of each rank's
    speaker   the rank that speaks and writes for all: the first one, or the first that is there
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self.limit, self.speaker, self.hosts = 1800.0, 0, ["its host"] * self._size
        self._exchange = np.zeros(1, np.int64)  # its number
        self._heard = np.zeros(self._size, np.int64)  # the last one that each rank has told of
        self._waited, self._last = 0.0, 0.0

    def begin(self) -> None:
        """Begin to wait in the next exchange."""
        self._exchange = self._exchange + 1
        self._waited, self._last = 0.0, time.monotonic()

    def look(self) -> None:
        """Note that this rank still waits. Raises RankLostError at the limit: at once in the
        speaker, in others if nothing comes of that. The end of the process is then that of all."""
        now = time.monotonic()
        self._waited += min(now - self._last, _MOST)
        self._last = now
        if self._waited < self.limit / 2:
            return
        if self._heard[self._rank] < self._exchange[0]:
            self._heard[self._rank] = self._exchange[0]
            for rank in {*range(min(_HEARERS, self._size))} - {self._rank}:
                self._comm.Isend(self._exchange, rank).Free()
        if self._waited >= self.limit:
            self._end()

    def _end(self) -> None:
        while self._comm.Iprobe(status=(status := MPI.Status())):
            self._comm.Recv(self._heard[status.source :][:1], status.source)
        absent = np.flatnonzero(self._heard < self._exchange[0]).tolist()
        hears = self._rank < _HEARERS
        if not hears or self._rank != np.argmax(self._heard >= self._exchange[0]):
            time.sleep(_GRACE)
        self.speaker = self._rank
        atexit.register(self._comm.Abort, _FAILED)  # before MPI's own end, which waits for all
        names = [f"rank {rank} on {self.hosts[rank]}" for rank in absent] if hears else ["a rank"]
        why = "it hangs, its host is down, or the network between"
        fault = f"of {self.limit:g} s has passed without {first_names(names, 3)}: {why}"
        raise RankLostError([("rank_timeout", fault)])
