"""Signed numbers as a map: a cell for each, its colour from the most negative to the most positive.

Light: RdBu of ColorBrewer (Brewer 2003), around the paper's white. Dark: the same hues around the
dark paper.
"""

from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np

from pyggml.look.draw import svg

# fmt: off
_LIGHT = ["#b2182b", "#d6604d", "#f4a582", "#fddbc7", "#f3f4f6", "#d1e5f0", "#92c5de", "#4393c3",
          "#2166ac"]
_DARK = ["#ff7a6b", "#d9604f", "#9c4a40", "#573531", "#262c35", "#2b4257", "#33658c", "#4a93c9",
         "#7cc0f5"]
# fmt: on
N_COLOURS = len(_LIGHT)
_CELL = (26.0, 20.0)  # width and height
_MARGIN, _LETTER, _LEAST_WIDTH = 12.0, 6.6, 330.0


STYLE = (
    svg.STYLE
    + f"""
.drawn {{ --alarm: #d3166b; {svg.variables("s", _LIGHT)} }}
@media (prefers-color-scheme: dark) {{ .drawn {{ --alarm: #ff6b9d; {svg.variables("s", _DARK)} }} }}
{" ".join(f".drawn .s{i} {{ fill: var(--s{i}); }}" for i in range(N_COLOURS))}
.drawn .sx {{ fill: var(--alarm); }}
"""
)


def signed_map(values: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str) -> str:
    """An SVG picture of values (R, C): blue above 0, red below, as dark as they are far from it.
    NaN leaves its cell empty. The pointer shows each number."""
    finite = values[np.isfinite(values)]
    most = float(np.abs(finite).max()) if finite.size else 0.0
    left = _MARGIN + 8 + _LETTER * max(map(len, rows), default=0)
    top = _MARGIN + 34 + 0.75 * _LETTER * max(map(len, columns), default=0)
    (w, h), right = _CELL, 0.65 * _LETTER * len(columns[-1]) if len(columns) else 0.0
    elements = [svg.text(_MARGIN, _MARGIN + 12, title, "title")]
    elements += (svg.aslant(left + (c + 0.4) * w, top - 6, x) for c, x in enumerate(columns))
    for r, row in enumerate(rows):
        elements.append(svg.text(left - 8, top + r * h + 14, row, "", "end"))
    elements += _cells(values, rows, columns, most, left, top)
    bottom = top + len(rows) * h + 14
    elements += _legend(most, _MARGIN, bottom)
    width = max(left + len(columns) * w + right + _MARGIN, _LEAST_WIDTH, _LETTER * len(title) + 24)
    return svg.picture(width, bottom + 42, elements, title, STYLE)


def colour(x: float, most: float) -> str:
    """The class of a number in [−most, most]: s0 to s8, s4 around 0, sx for what is infinite."""
    if not isfinite(x):
        return "sx"
    part = x / most if most else 0.0
    return f"s{round((part + 1) / 2 * (N_COLOURS - 1))}"


def _cells(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    most: float,
    left: float,
    top: float,
) -> Iterator[str]:
    w, h = _CELL
    for (r, c), x in np.ndenumerate(values):
        if not np.isnan(x):
            about = f"{rows[r]}, {columns[c]}: {x:.4g}"
            yield svg.tile(left + c * w, top + r * h, w - 1, h - 1, colour(x, most), about)


def _legend(most: float, x: float, y: float) -> Iterator[str]:
    w = 30.0
    for i in range(N_COLOURS):
        middle = most * (2 * i / (N_COLOURS - 1) - 1)
        yield svg.tile(x + i * w, y, w, 12, f"s{i}", f"{middle:.3g}")
    for part, number in ((0.0, -most), (0.5, 0.0), (1.0, most)):
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[part]
        yield svg.text(x + part * N_COLOURS * w, y + 26, f"{number:.3g}", "faint", anchor)
