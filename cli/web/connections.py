"""Connections: how long each phase of one may last, and which make room where places are short.

A connection begins with nothing known of who is at its other end. Whatever it waits for has an end:

    head     from the connection's first moment, or the first byte of a further head, to its last
    idle     between an answer and the next head
    body     while a body comes, which must keep a rate
    answer   while the program works, and as long as what it wrote is taken at a rate
    parting  after the last answer: for what is still to be taken, and for the rest of a body

Where all places are taken, a connection without a request under way gives its place up: first one
that has shown no right to be here, of the address with most of these, the one that came first.
"""

import asyncio
import ipaddress
import logging
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# uvicorn warns of every head that is none. Strangers would fill the log; what fails is an error.
_QUIET = logging.getLogger("pyggml.connections")
_QUIET.setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a phase may last; of what comes or goes in pieces, besides the time that its
    bytes take at `rate` bytes a second.

    idle is longer than clients keep a connection (httpx 5 s, aiohttp 15 s), else a request can be
    under way when its connection is closed.
    """

    head: float = 10.0
    idle: float = 20.0
    body: float = 10.0
    answer: float = 30.0
    parting: float = 3.0
    rate: float = 32768.0


class Phase(Enum):
    """What a connection waits for."""

    HEAD = auto()
    IDLE = auto()
    BODY = auto()
    ANSWER = auto()
    PARTING = auto()


@dataclass(slots=True)
class Places:
    """The connections of a server.

    most              that may be open at once
    most_of_address   that one address may have without a right to be here; of IPv6, a /64 network
    """

    most: int
    patience: Patience = field(default_factory=Patience)
    _taken: dict["Connection", None] = field(default_factory=dict)
    _n_of: Counter[str] = field(default_factory=Counter)  # of each address

    @property
    def most_of_address(self) -> int:
        return max(1, self.most // 2)

    @property
    def are_full(self) -> bool:
        """Whether more connections are open than may be, as none could be closed for the last."""
        return len(self._taken) > self.most

    def take(self, newcomer: "Connection") -> None:
        """Give a connection a place, which another may lose."""
        self._taken[newcomer] = None
        self._n_of[newcomer.address] += 1
        if self._n_of[newcomer.address] > self.most_of_address:
            self._close_oldest_stranger(newcomer.address, newcomer)
        if self.are_full:
            crowds = Counter(c.address for c in self._taken if not c.is_welcome and c.may_go)
            for crowd, _ in crowds.most_common(1):
                self._close_oldest_stranger(crowd, newcomer)
        while self.are_full:
            idle = [c for c in self._taken if c.may_go and c is not newcomer]
            if not idle:
                return
            self._close(min(idle, key=lambda c: c.since))

    def leave(self, connection: "Connection") -> None:
        if connection in self._taken:
            del self._taken[connection]
            self._n_of[connection.address] -= 1
            if not self._n_of[connection.address]:
                del self._n_of[connection.address]

    def sweep(self, now: float) -> None:
        """Close what has waited too long. now: seconds of the event loop's clock."""
        for connection in [*self._taken]:
            if connection.is_late(now):
                self._close(connection)

    def _close_oldest_stranger(self, address: str, newcomer: "Connection") -> None:
        """That of an address which came first: the order is that in which places were taken."""
        for c in self._taken:
            if c.address == address and not c.is_welcome and c is not newcomer and c.may_go:
                self._close(c)
                return

    def _close(self, connection: "Connection") -> None:
        self.leave(connection)
        connection.transport.abort()


class Connection(H11Protocol):
    """uvicorn's connection, watched by the places of its server.

    Applications find it as scope["state"]["connection"].

    is_welcome   whether a request on it had a right to be answered
    address      whose it is
    since        when its phase began, by the event loop's clock
    """

    def __init__(self, places: Places, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.logger = _QUIET
        self.app_state = {**self.app_state, "connection": self}
        self.places, self.is_welcome, self.address = places, False, ""
        self._phase, self.since = Phase.HEAD, self.loop.time()
        self._n_come = 0  # bytes of the body
        self._n_left, self._stalled = 0, 0.0  # bytes to be taken, and since when

    @property
    def may_go(self) -> bool:
        """Whether it has no request under way, or a stranger's whose answer is not taken."""
        waits = self._phase in (Phase.HEAD, Phase.IDLE, Phase.PARTING)
        return waits or (not self.is_welcome and self.flow.write_paused)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as its base
        super().connection_made(transport)
        self.address = network_of(self.client[0] if self.client else "")
        self.places.take(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        begins = self._phase is Phase.IDLE
        super().data_received(data)
        if self._look() is Phase.BODY:
            self._n_come += len(data)
        elif begins and self._phase is Phase.IDLE:  # a head has begun
            self._enter(Phase.HEAD)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def is_late(self, now: float) -> bool:
        """Whether its phase has lasted too long."""
        phase, patience = self._look(), self.places.patience
        if self._is_stalled(now):
            return True
        match phase:
            case Phase.HEAD:
                return now - self.since > patience.head
            case Phase.IDLE:
                return now - self.since > patience.idle
            case Phase.BODY:  # the application refuses it first, in words
                most = patience.body + self._n_come / patience.rate + patience.parting
                return now - self.since > most
            case Phase.PARTING:
                return now - self.since > patience.parting and not self._n_left
        return False

    def _is_stalled(self, now: float) -> bool:
        """Whether what was written is not taken, or too slowly."""
        left = self.transport.get_write_buffer_size()
        grows = not (self.flow.write_paused or self._phase is Phase.PARTING or self._is_answered)
        if not left or grows or not self._n_left:
            self._n_left, self._stalled = left, now
            return False
        taken = max(0, self._n_left - left)
        patience = self.places.patience
        return now - self._stalled > patience.answer + taken / patience.rate

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> Phase:
        """The phase that it is in now."""
        their = self.conn.their_state
        if self.transport.is_closing():
            phase = Phase.PARTING
        elif their is h11.SEND_BODY:
            phase = Phase.PARTING if self._is_answered else Phase.BODY
        elif not self._is_answered:
            phase = Phase.ANSWER
        elif their is not h11.IDLE:
            phase = Phase.PARTING
        elif self.cycle is None or self._phase is Phase.HEAD:
            phase = Phase.HEAD
        else:
            phase = Phase.IDLE
        if phase is not self._phase:
            self._enter(phase)
        return phase

    def _enter(self, phase: Phase) -> None:
        self._phase, self.since, self._n_come = phase, self.loop.time(), 0


def network_of(host: str) -> str:
    """Whose an address is: one person has a whole /64 network of IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
