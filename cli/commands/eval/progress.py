"""How far an evaluation is, on standard error."""

from __future__ import annotations

import sys
from time import perf_counter

from pyggml.cli.terminal.show import span

_WORTH_TELLING = 5.0  # seconds


class Progress:
    """Called after each pass. On a terminal a line that changes, else one line of what is left.

    The first pass may compile, so it is no measure of the others.
    """

    def __init__(self, label: str) -> None:
        self._label, self._began = label, 0.0
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, done: int, n: int) -> None:
        if done == 1:
            self._began = perf_counter()
        left = (perf_counter() - self._began) / (done - 1) * (n - done) if done > 1 else None
        if self._is_terminal:
            time = f", some {span(left)} left" if left else ""
            text = f"{self._label}: {done} of {n} passes{time}" if done < n else ""
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif done == 2 and left and left > _WORTH_TELLING:
            print(f"{self._label}: {n} passes, some {span(left)} left", file=sys.stderr, flush=True)
