"""What ends a run early: Ctrl-C, SIGTERM, a closed terminal, a closed pipe.

Each asks for an end after the step under way; a second Ctrl-C or SIGTERM ends at once.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from pyggml.cli.terminal.exit import STOPPED, note_signal, silence

# SIGHUP: the terminal was closed (POSIX). SIGBREAK: the console was (Windows), or Ctrl-Break.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_HANGUP = getattr(signal, "SIGHUP", None)
_GONE = (errno.EPIPE, errno.EIO, errno.EINVAL)  # a closed pipe; a closed terminal; both on Windows
_NOTE = b"\nstopping after this step; Ctrl-C again ends at once, without saving\n"


@contextmanager
def stop_on_signals(stop: Callable[[], None], note: bytes = _NOTE) -> Iterator[None]:
    """A context in which a first signal, or a standard output without a reader, calls `stop`; the
    note tells the user.

    The same signal again raises SystemExit; KeyboardInterrupt would make the trainer save once
    more. SIGHUP is an exception: a shell and the system may both send it. An output lost for
    another reason, such as a full disk, is an OSError at the end.
    """
    received: set[int] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        if number in received and number != _HANGUP:
            raise SystemExit(STOPPED)
        received.add(number)
        note_signal(number)
        stop()
        with suppress(OSError):
            os.write(2, note)  # print is not safe here: it may be what was interrupted

    heard = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]  # nohup, or `&`
    before = {s: signal.signal(s, handle) for s in heard}
    try:
        with _survive_lost_output(stop):
            yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextmanager
def _survive_lost_output(stop: Callable[[], None]) -> Iterator[None]:
    """A context in which a standard stream that fails calls `stop`; nothing is raised."""
    before, faults = (sys.stdout, sys.stderr), list[OSError]()

    def note_fault(error: OSError) -> None:
        faults.append(error)
        stop()

    sys.stdout, sys.stderr = (_Stream(stream, note_fault) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
    if faults and faults[0].errno not in _GONE:
        raise faults[0]


class _Stream:
    """A standard stream that reports its first failure; what follows it goes nowhere."""

    def __init__(self, stream: TextIO, note_fault: Callable[[OSError], None]) -> None:
        self._stream, self._note_fault = stream, note_fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            silence(self._stream)
            self._note_fault(error)
