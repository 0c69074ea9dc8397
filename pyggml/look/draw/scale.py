"""Numbers as colours: nine classes from least to greatest, which know light and dark.

Light: YlGnBu of ColorBrewer (Brewer 2003). Dark: viridis (Smith, van der Walt 2015). In both, what
stands out from the page is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, log10

import numpy as np

from pyggml.look.draw import svg
from pyggml.look.draw.ticks import linear_labels, linear_ticks, log_labels, log_ticks

_DECADES = 6.0  # of a logarithmic scale, at most: what is less has the lowest colour
# fmt: off
_LIGHT = ["#eef6c8", "#d5eeb3", "#a9ddb7", "#73c8bd", "#40b0c4", "#2290c1", "#2468ac", "#273d97",
          "#0d2262"]
_DARK = ["#3b2a5c", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151",
         "#e6e11f"]
# fmt: on
N_LEVELS = len(_LIGHT)
SCALE_STYLE = f"""
.drawn {{ --zero: #e6e8ec; --alarm: #d3166b; {svg.variables("h", _LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  .drawn {{ --zero: #2b313b; --alarm: #ff6b9d; {svg.variables("h", _DARK)} }} }}
{" ".join(f".drawn .h{i} {{ fill: var(--h{i}); }}" for i in range(N_LEVELS))}
.drawn .hz {{ fill: var(--zero); }} .drawn .hn {{ fill: var(--alarm); }}
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers from `low` to `high` → levels 0 to 8; or their decimal logarithms, if `is_log`."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def logarithmic(cls, numbers: np.ndarray) -> Scale:
        """From the least to the greatest of those that are finite and above 0; six decades at
        most."""
        positive = numbers[np.isfinite(numbers) & (numbers > 0)]
        if not positive.size:
            return cls(0.0, 1.0, is_log=True)
        high = log10(positive.max())
        return cls(max(log10(positive.min()), high - _DECADES), high, is_log=True)

    def level(self, x: float) -> int:
        """x: finite, and above 0 if the scale is logarithmic."""
        at = log10(x) if self.is_log else x
        part = (at - self.low) / (self.high - self.low) if self.high > self.low else 1.0
        return min(max(int(part * N_LEVELS), 0), N_LEVELS - 1)

    def at(self, part: float) -> float:
        """The number at this part of the scale, from 0 to 1."""
        value = self.low + part * (self.high - self.low)
        return float(10.0**value) if self.is_log else value

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers along the scale: the part of it that each stands at, and its text."""
        if not self.is_log:
            numbers = linear_ticks(self.high)
            texts = zip(numbers, linear_labels(numbers), strict=True)
            return [(x / self.high, s) for x, s in texts]
        numbers, width = log_ticks(self.low, self.high), self.high - self.low
        if not numbers or not width:  # too narrow for a round one
            return [(part, f"{self.at(part):.3g}") for part in (0.0, 1.0)[: 1 + bool(width)]]
        texts = zip(numbers, log_labels(numbers), strict=True)
        return [((log10(x) - self.low) / width, s) for x, s in texts]

    def colour(self, x: float) -> str:
        """The class: h0 to h8, hz for 0, hn for what is not finite."""
        return "hn" if not isfinite(x) else "hz" if x == 0 else f"h{self.level(x)}"
