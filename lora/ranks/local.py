"""Ranks of one machine that the first one starts itself: no launcher and no MPI is needed.

Every two of them share a pair of sockets, made before they are started, which no other process can
reach. A rank that ends closes its own, so whoever waits for it is told at once.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import MSG_PEEK, socket, socketpair

import numpy as np

import pyggml
from pyggml.errors import ConfigError, PyggmlError, first_names
from pyggml.lora.ranks.alone import RankLostError
from pyggml.lora.ranks.exchanging import ExchangingRanks

_VARIABLE = "PYGGML_RANK"  # of a started process: its number, and its sockets by rank
_GRACE = 10  # seconds in which a rank ends by itself, once the first one has
_SOON = 1  # seconds in which the system tells how a process has ended whose sockets it has closed
_AWAKE = 5e-4  # seconds in which ranks come that have as much to do; who sleeps is woken late
_FLAG = 8  # bytes
_LOOK = 1  # seconds between two looks at how long nothing has come
_Views = dict[int, list[memoryview]]


class LocalRanks(ExchangingRanks):
    """Processes of this machine, joined by sockets. helpers: of the first, those that it started,
    by rank."""

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket],
        helpers: Mapping[int, subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self.rank = self.on_host = rank
        self.size = self.n_beside = len(sockets) + 1
        self._sockets, self._helpers = sockets, dict(helpers or {})
        self._gone = set[int]()
        for each in sockets.values():
            each.setblocking(False)

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_first(self) -> bool:
        return self._gone.issuperset(range(self.rank))

    def look(self) -> None:
        for rank, each in self._sockets.items():
            if _is_closed(each):
                raise self._lost(rank)
            if _has_failed(each):
                raise PyggmlError(f"rank {rank} has failed")

    def abort(self, code: int) -> None:
        for helper in self._helpers.values():
            helper.kill()
        self.close()

    def close(self) -> None:
        """Leave the group; the first rank waits until the others have ended."""
        for each in self._sockets.values():
            each.close()
        for helper in self._helpers.values():
            try:
                helper.wait(_GRACE)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()

    def _gather(
        self, mine: np.ndarray, target: np.ndarray, counts: Sequence[int], pauses: bool = True
    ) -> None:
        self._deal([[mine]] * self.size, target, counts)

    def _deal(
        self, sent: Sequence[Sequence[np.ndarray]], target: np.ndarray, counts: Sequence[int]
    ) -> None:
        ends = np.cumsum(counts)[:-1]
        parts = [[part] if part.size else [] for part in np.split(target.reshape(-1), ends)]
        for part in parts[self.rank]:
            np.concatenate([each.reshape(-1) for each in sent[self.rank]], out=part)
        self._move(
            {r: [_bytes(a) for a in sent[r] if a.size] for r in self._sockets},
            {r: [_bytes(a) for a in parts[r]] for r in self._sockets},
        )

    def _move(self, going: _Views, coming: _Views) -> None:
        """Send and receive all of these at once, after a while asleep where no byte can move."""
        until = time.perf_counter() + _AWAKE
        idle = 0  # seconds; a process that was stopped for long counts one
        while idle < self.limit:
            waiting = select.poll()
            for rank, each in self._sockets.items():
                try:
                    _push(each, going[rank])
                    _pull(each, coming[rank])
                except ConnectionError:
                    raise self._lost(rank) from None
                events = bool(coming[rank]) * select.POLLIN | bool(going[rank]) * select.POLLOUT
                if events:
                    waiting.register(each, events)
            if not (any(going.values()) or any(coming.values())):
                return
            if time.perf_counter() < until:
                time.sleep(0)
                continue
            idle = 0 if waiting.poll(1000 * _LOOK) else idle + _LOOK
        absent = [f"rank {rank}" for rank in self._sockets if coming[rank] or going[rank]]
        fault = f"of {self.limit:g} s has passed without {first_names(absent, 3)}: it hangs"
        raise RankLostError([("rank_timeout", fault)])

    def _lost(self, rank: int) -> RankLostError:
        """What has happened, as far as the first rank can tell: another one may have been the first
        to end, and this one for want of it."""
        self._gone |= {rank, *(r for r, each in self._sockets.items() if _is_closed(each))}
        if rank in self._helpers:
            with suppress(subprocess.TimeoutExpired):
                self._helpers[rank].wait(_SOON)
        for each, helper in self._helpers.items():
            if (code := helper.poll() or 0) < 0:
                return RankLostError(f"rank {each} was killed ({signal.Signals(-code).name})")
        return RankLostError(f"rank {rank} has ended, and was not expected to")


def _has_failed(each: socket) -> bool:
    """Whether the flag has come with which a rank that has failed begins its next exchange."""
    try:
        return any(each.recv(_FLAG, MSG_PEEK))
    except BlockingIOError:
        return False


def start(n: int, command: Sequence[str]) -> LocalRanks:
    """The first of n ranks; the others run this command line, which comes to `group_of_process`.

    Raises ConfigError where the system cannot hand sockets on.
    """
    if os.name != "posix":
        raise ConfigError("processes start each other on Linux and macOS alone: wanted mpiexec")
    ends: dict[int, dict[int, socket]] = {rank: {} for rank in range(n)}
    for a in range(n):
        for b in range(a):
            ends[a][b], ends[b][a] = socketpair()
    paths = [str(Path(pyggml.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    where = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    helpers = {}
    for rank in range(1, n):
        numbers = {other: each.fileno() for other, each in ends[rank].items()}
        helpers[rank] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | where | {_VARIABLE: json.dumps([rank, numbers])},
            pass_fds=numbers.values(),
            start_new_session=True,  # Ctrl-C is for the first, which tells the others
        )
        for each in ends[rank].values():
            each.close()
    return LocalRanks(0, ends[0], helpers)


def group_of_process() -> LocalRanks | None:
    """The group for which the first rank started this process; None of any other process."""
    told = os.environ.pop(_VARIABLE, None)  # it is not for those that this process starts
    if told is None:
        return None
    rank, numbers = json.loads(told)
    sockets = {int(other): socket(fileno=number) for other, number in numbers.items()}
    for each in sockets.values():
        os.set_inheritable(each.fileno(), False)
    return LocalRanks(rank, sockets)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _push(each: socket, views: list[memoryview]) -> None:
    """Send as much as goes now; what is left stays in the list."""
    while views:
        try:
            n = each.send(views[0])
        except BlockingIOError:
            return
        views[:1] = [views[0][n:]] if n < len(views[0]) else []


def _pull(each: socket, views: list[memoryview]) -> None:
    """Receive as much as has come. Raises ConnectionError if the other end is gone."""
    while views:
        try:
            n = each.recv_into(views[0])
        except BlockingIOError:
            return
        if not n:
            raise ConnectionResetError
        views[:1] = [views[0][n:]] if n < len(views[0]) else []


def _is_closed(each: socket) -> bool:
    """Whether the other end is gone, and nothing of it is left to be read."""
    try:
        return each.recv(1, MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
