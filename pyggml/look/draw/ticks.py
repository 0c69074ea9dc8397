"""Round numbers along an axis, and their texts in one format."""

from collections.abc import Sequence
from math import ceil, floor, inf, log10

_ROUND = (1, 2, 5, 10)
_LEAST_PLAIN, _MOST_PLAIN = 1e-4, 1e6  # of a logarithmic axis without powers of ten as exponents
_MOST_LOG = 6  # ticks of a logarithmic axis


def linear_ticks(high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from 0 to `high`, at most `most` of them."""
    if not 0 < high < inf:
        return [0.0]
    power = 10.0 ** floor(log10(high / most))
    step = next(k * power for k in (*_ROUND, 20, 50) if floor(high / (k * power) + 1e-9) < most)
    return [i * step for i in range(floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """From 10^low to 10^high: powers of ten, some where there are many; 1, 2 and 5 times one where
    there is at most one."""
    first, last = ceil(low - 1e-9), floor(high + 1e-9)
    if last - first >= 1:
        step = ceil((last - first + 1) / _MOST_LOG)
        return [10.0**i for i in range(first, last + 1, step)]
    every = [k * 10.0**i for i in range(floor(low), last + 1) for k in _ROUND[:3]]
    return [x for x in every if low - 1e-9 <= log10(x) <= high + 1e-9]


def linear_labels(ticks: Sequence[float]) -> list[str]:
    """0.0, 0.5, 1.0: with as many decimals as the step needs."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    decimals = max(0, -floor(log10(step) + 1e-9))
    return [f"{x:,.{decimals}f}" for x in ticks]


def log_labels(ticks: Sequence[float]) -> list[str]:
    """0.01, 0.1, 1, all so; or all as 1e-6, 1e-5, 1e-4."""
    is_plain = all(_LEAST_PLAIN * 0.99 <= x <= _MOST_PLAIN for x in ticks)
    if is_plain:
        return [f"{round(x, 4):.10g}" for x in ticks]
    return [f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e") for x in ticks]
