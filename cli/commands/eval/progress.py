"""How far an evaluation is, on standard error."""

import sys

from pyggml.cli.terminal.progress import Countdown
from pyggml.cli.terminal.show import say_progress, span

_WORTH_TELLING = 5.0  # seconds


class Progress:
    """Called after each pass. On a terminal a line that changes, else one line of what is left."""

    def __init__(self, label: str) -> None:
        self._label, self._time = label, Countdown()
        self._is_terminal, self._width = sys.stderr.isatty(), 0

    def __call__(self, done: int, n: int) -> None:
        left = self._time.left(done, n)
        if self._is_terminal:
            time = f", some {span(left)} left" if left else ""
            text = f"{self._label}: {done} of {n} passes{time}" if done < n else ""
            gap = " " * (self._width - len(text))  # over the end of the line that stood there
            say_progress(f"\r{text}{gap}" + "\r" * (not text), end="")
            self._width = len(text)
        elif done == 2 and left and left > _WORTH_TELLING:
            say_progress(f"{self._label}: {n} passes, some {span(left)} left")
