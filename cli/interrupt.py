"""Ctrl-C: the first press asks for an end after the step under way, the second ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from pyggml.cli.run import STOPPED

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTE = b"\nstopping after this step; Ctrl-C again ends at once, without saving\n"


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM calls `stop` and the second raises SystemExit.

    (KeyboardInterrupt would make the trainer save once more.)
    """
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise SystemExit(STOPPED)
        pressed = True
        stop()
        with suppress(OSError):
            os.write(2, _NOTE)  # print is not safe here: it may be what was interrupted

    heard = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]  # nohup, or `&`
    before = {s: signal.signal(s, handle) for s in heard}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
