"""How far an evaluation is, on standard error."""

from pyggml.cli.terminal.progress import ChangingLine, Countdown
from pyggml.cli.terminal.show import say_progress, span

_WORTH_TELLING = 5.0  # seconds


class PassProgress:
    """Called after each pass. On a terminal a line that changes, else one line of what is left."""

    def __init__(self, label: str) -> None:
        self._label, self._time = label, Countdown()
        self._line = ChangingLine()

    def __call__(self, done: int, n: int) -> None:
        left = self._time.seconds_left(done, n)
        if self._line.is_shown:
            time = f", some {span(left)} left" if left else ""
            self._line.show(f"{self._label}: {done} of {n} passes{time}" if done < n else "")
        elif done == 2 and left and left > _WORTH_TELLING:
            say_progress(f"{self._label}: {n} passes, some {span(left)} left")
