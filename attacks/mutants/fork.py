"""A fork of this process that tells what it does, and is ended when that takes too long."""

import contextlib
import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

_MEMORY = 12 << 30  # bytes of address space
_PATIENCE = 10  # times as long as its limit may a process wait for others
Told = dict[str, Any]
Tell = Callable[[Told], None]


@dataclass(slots=True)
class Ended:
    """What a fork told, and "", "hung" or "crashed"."""

    told: list[Told]
    why: str


def in_fork(run: Callable[[Tell], None], limit: Callable[[Told], float]) -> Ended:
    """Run something in a fork, in a session, a folder and with address space of its own.

    It is ended when it has computed for as many seconds as `limit` gives for what it told last.
    """
    reading, writing = os.pipe()
    folder = tempfile.mkdtemp(prefix="mutant-")
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_and_end(run, writing, folder)
    os.close(writing)
    try:
        return _listen(reading, child, limit)
    finally:
        os.close(reading)
        shutil.rmtree(folder, ignore_errors=True)


def _run_and_end(run: Callable[[Tell], None], writing: int, folder: str) -> NoReturn:
    """The whole of a fork."""

    def tell(told: Told) -> None:
        os.write(writing, json.dumps(told).encode() + b"\n")

    try:
        os.setsid()
        faulthandler.disable()
        os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = folder
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        run(tell)
        tell({"end": ""})
    except BaseException:
        tell({"end": traceback.format_exc()})
    finally:
        os._exit(0)


def _listen(reading: int, child: int, limit: Callable[[Told], float]) -> Ended:
    """Read what a fork tells, until it ends or is ended, and all that it started."""
    told: list[Told] = [{}]
    data, why, start, busy = b"", "", time.monotonic(), _seconds_of(child)
    while "end" not in told[-1]:
        if select.select([reading], [], [], 1.0)[0]:
            piece = os.read(reading, 1 << 20)
            if not piece:
                why = "crashed"
                break
            *whole, data = (data + piece).split(b"\n")
            told += [json.loads(line) for line in whole]
            start, busy = time.monotonic(), _seconds_of(child)
            continue
        most = limit(told[-1])
        if _seconds_of(child) - busy > most or time.monotonic() - start > _PATIENCE * most:
            why = "hung"
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Ended(told, why)


def _seconds_of(child: int) -> float:
    """The processor's time that a process and its children have taken."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(child)
        for one in (process, *process.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total
