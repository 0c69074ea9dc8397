"""Python's clocks, but they jump: with this folder in PYTHONPATH, from the start of the process.

The time of day leaves for minutes, days or years, back and forth. The clocks that never go back
stand still for some readings, or leap by an hour.
"""

import random
import time
from collections.abc import Callable

_drawn = random.Random(0)
_DAYS_AWAY = (0, 0, 1e-3, -1e-3, 1, -1, 3650, -3650)
_SECONDS_ON = (0.0, 0.0, 0.0, 0.5, 3600.0)


def _time_of_day(now: Callable[[], float]) -> Callable[[], float]:
    return lambda: now() + 86400 * _drawn.choice(_DAYS_AWAY)


def _never_back(now: Callable[[], float]) -> Callable[[], float]:
    """Real seconds and drawn leaps; half of the readings are the last one again."""
    leaps, last = 0.0, now()

    def read() -> float:
        nonlocal leaps, last
        if _drawn.random() < 0.5:
            leaps += _drawn.choice(_SECONDS_ON)
            last = now() + leaps
        return last

    return read


def _in_ns(now: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(1e9 * now())


time.time, time.monotonic = _time_of_day(time.time), _never_back(time.monotonic)
time.perf_counter = _never_back(time.perf_counter)
time.time_ns, time.monotonic_ns = _in_ns(time.time), _in_ns(time.monotonic)
time.perf_counter_ns = _in_ns(time.perf_counter)
