"""Ranks over MPI.

Every exchange is begun and then asked after, not waited for: signals are heard meanwhile, and a
processor is left to ranks that still compute. Only numbers and UTF-8 text are sent.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from pyggml.errors import PyggmlError
from pyggml.lora.ranks.alone import RankLostError, Ranks, share
from pyggml.lora.ranks.roll import Roll

_SHORTEST, _LONGEST = 20e-6, 2e-3  # seconds between two looks


class MpiRanks(Ranks):
    """All processes of MPI.COMM_WORLD."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._roll = Roll(self._comm)
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
        self._roll.limit = seconds

    def any(self, flag: bool) -> bool:
        self._agree()
        return bool(self._gather_all(np.array([flag], np.int64)).any())

    def texts(self, text: str) -> list[str]:
        self._agree()
        return self._texts(text)

    def join(self, rows: np.ndarray, n: int) -> np.ndarray:
        self._agree()
        width = int(np.prod(rows.shape[1:]))
        counts = [len(share) * width for share in self._shares(n)]
        all_rows = np.empty((n, *rows.shape[1:]), rows.dtype)
        self._gather(np.ascontiguousarray(rows), all_rows, counts)
        return all_rows

    def add(self, gradients: Sequence[np.ndarray], n: int, size: int) -> np.ndarray:
        """Each rank adds one part of all gradients; then the parts are joined."""
        self._agree()
        counts = [len(share) for share in self._shares(n)]
        ends = [size * i // self.size for i in range(self.size + 1)]
        sizes = np.diff(ends)
        here = int(sizes[self.rank])
        sent = [g[first:end] for first, end in pairwise(ends) for g in gradients]
        received = np.empty(sum(counts) * here, np.float32)
        self._wait(
            self._comm.Ialltoallv(
                [np.concatenate([*sent, np.empty(0, np.float32)]), sizes * len(gradients)],
                [received, [count * here for count in counts]],
            )
        )
        part = super().add(list(received.reshape(-1, here)), n, here)
        total = np.empty(size, np.float32)
        self._gather(part, total, sizes.tolist())
        return total

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, _KNOWN) or isinstance(error.__cause__, _KNOWN):
                raise
            self._agree(error)
        else:
            self._agree()

    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    # -- exchanges ------------------------------------------------------------------------------

    def _agree(self, fault: Exception | None = None) -> None:
        """Begin an exchange. All ranks raise if one of them has a fault."""
        if not self._gather_all(np.array([fault is not None], np.int64)).any():
            return
        told = self._texts(_to_json(fault))
        if fault is not None and not isinstance(fault, PyggmlError):
            raise fault  # of the program, with its traceback
        raise _joint(told) from fault

    def _texts(self, text: str) -> list[str]:
        mine = np.frombuffer(text.encode(), np.uint8)
        counts = self._gather_all(np.array([len(mine)], np.int64)).tolist()
        data = np.empty(sum(counts), np.uint8)
        self._gather(mine, data, counts)
        ends = zip(counts, np.cumsum(counts), strict=True)
        return [data[end - n : end].tobytes().decode() for n, end in ends]

    def _shares(self, n: int) -> list[range]:
        return [share(n, rank, self.size) for rank in range(self.size)]

    def _gather_all(self, values: np.ndarray) -> np.ndarray:
        """As many numbers of each rank, one rank after the other."""
        numbers = np.empty(self.size * len(values), values.dtype)
        self._wait(self._comm.Iallgather(values, numbers))
        return numbers

    def _gather(self, mine: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        """target: counts[r] numbers of each rank r, one rank after the other."""
        self._wait(self._comm.Iallgatherv(mine, [target, list(counts)]))

    def _wait(self, request: MPI.Request) -> None:
        pause = _SHORTEST
        self._roll.begin()
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            self._roll.look()


def _to_json(error: Exception | None) -> str:
    """An error as JSON: its faults, and the text before them."""
    if error is None:
        return json.dumps([])
    if isinstance(error, PyggmlError):
        return json.dumps([error.about, *error.faults])
    return json.dumps(["", f"{type(error).__name__}: {error}"])


class _JointError(PyggmlError):
    """An error of which all ranks know."""


_KNOWN = (_JointError, RankLostError)


def _joint(told: Sequence[str]) -> _JointError:
    """The error of all ranks, or those of some, each with the first rank that has it."""
    errors: dict[str, tuple[int, _JointError]] = {}
    for rank, text in enumerate(told):
        about, *faults = json.loads(text) or [""]
        pairs = (f if isinstance(f, str) else (f[0], f[1]) for f in faults)
        if faults:
            errors.setdefault(text, (rank, _JointError(pairs, about)))
    if len(set(told)) == 1:
        return errors[told[0]][1]
    return _JointError(f"rank {rank}: {error}" for rank, error in errors.values())


def _processors() -> str:
    """Those that the launcher gave this process."""
    try:
        return str(sorted(os.sched_getaffinity(0)))  # not on macOS and Windows
    except AttributeError:
        return "all"
