"""Ways from card to card, by NVIDIA's NCCL: what one sends goes over NVLink or PCIe to the other.

Only sending and receiving is asked of NCCL, no sum: the order of its sums depends on the number of
cards.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from weakref import finalize

from pyggml.backends.base import Links
from pyggml.backends.cuda.runtime.driver import direct, driver
from pyggml.backends.cuda.runtime.events import Event
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.backends.cuda.runtime.transfers import Bytes
from pyggml.errors import DeviceError
from pyggml.extras import how_to_install
from pyggml.graph.tensor import Tensor

_BYTE = 1  # ncclUint8
_AWAKE = 2e-3  # seconds: most exchanges
_SHARE, _LONGEST = 1 / 16, 1e-3  # of the time that was waited, and seconds, between two looks


class NcclLinks(Links):
    """Those of one card.

    stream: of its work; bytes_of: a tensor's place; working: makes the card current
    Raises DeviceError where NCCL is missing.
    """

    def __init__(
        self,
        index: int,
        stream: Any,
        bytes_of: Callable[[Tensor], Bytes],
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._nccl, self.place = _library(), str(driver.get_device(index).uuid)
        self._stream, self._bytes_of, self._working = stream, bytes_of, working
        self._name, self._rank, self._links = f"cuda:{index}", 0, None

    def word(self) -> str:
        with self._working(), _Explained(self._name):
            return bytes(self._nccl.get_unique_id()).hex()

    def join(self, word: str, rank: int, size: int) -> None:
        self._rank, ident = rank, bytearray.fromhex(word)
        with self._working(), _Explained(self._name):
            self._links = self._nccl.comm_init_rank_scalable(size, rank, 1, ident, 0)
        self._end = finalize(self, self._nccl.comm_abort, self._links)
        self._end.atexit = False

    def exchange(
        self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]
    ) -> None:
        own = ([self._bytes_of(t) for r, t in ways if r == self._rank] for ways in (sent, received))
        with self._working(), _Explained(self._name):
            for source, target in zip(*own, strict=True):
                stream = self._stream.handle
                direct.cuMemcpyDtoDAsync(target.address, source.address, source.n, stream)
            self._nccl.group_start()
            for rank, t in sent:
                self._ask(self._nccl.send, rank, t)
            for rank, t in received:
                self._ask(self._nccl.recv, rank, t)
            self._nccl.group_end()

    def _ask(self, call: Callable[..., None], rank: int, t: Tensor) -> None:
        if rank != self._rank:
            place, stream = self._bytes_of(t), int(self._stream.handle)
            call(place.address, place.n, _BYTE, rank, self._links, stream)

    def wait(self, look: Callable[[], None]) -> None:
        with self._working():
            done = Event()
            done.record(self._stream)
        began = time.perf_counter()
        try:
            while not self._is_done(done):
                look()
                if (waited := time.perf_counter() - began) > _AWAKE:
                    time.sleep(min(waited * _SHARE, _LONGEST))
        except BaseException:
            self.cut()
            raise

    def cut(self) -> None:
        self._end()

    def _is_done(self, event: Event) -> bool:
        with self._working():
            return event.is_done()


class _Explained(AbstractContextManager[None]):
    """Makes an error of NCCL a DeviceError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if type(error).__module__.partition(".")[0] == "nccl":
            raise DeviceError(f"{self._name} cannot reach other cards: NCCL: {error}") from error


@cache
def _library() -> Any:
    """The bindings of NCCL. Raises DeviceError without them, or without the library."""
    if SIMULATED:
        raise DeviceError("the simulator has no way to other cards")
    advice = f"wanted {how_to_install('cards')}"
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except ImportError as error:
        raise DeviceError(f"the package {error.name} is missing, {advice}") from None
    except RuntimeError as error:  # the bindings are there, and find no library
        raise DeviceError(f"NCCL is missing ({' '.join(str(error).split())}), {advice}") from None
    # What is sent goes from one to one: multicast would take memory for nothing.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return nccl
