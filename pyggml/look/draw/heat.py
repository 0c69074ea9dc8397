"""The gradient overview as heat maps: a row for each layer, a column for each module.

A cell's colour is one of nine, over a logarithmic scale but for shares. What is dead, exploding or
not finite has a mark as well, and the pointer shows every number.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil, isfinite

import numpy as np

from pyggml.look.draw import svg
from pyggml.look.draw.layers import Point
from pyggml.look.draw.scale import N_LEVELS, SCALE_STYLE, Scale
from pyggml.look.overview import Flag, Overview, flags, in_words, layer_flags

STYLE = (
    svg.STYLE
    + SCALE_STYLE
    + """
.drawn text.mark { font-size: 11px; font-weight: 700; text-anchor: middle;
  stroke: var(--paper); stroke-width: 3px; paint-order: stroke; }
.drawn rect.unknown { fill: none; stroke: var(--line); stroke-width: 0.5; }
.drawn path.tiles { stroke: none; }
"""
)
MARKS = {Flag.DEAD: "×", Flag.EXPLODING: "▲", Flag.NOT_FINITE: "!"}
_CELL, _SMALL = (26.0, 15.0), (7.0, 5.0)  # width and height; of the small multiple
_MARGIN, _LABEL, _LETTER = 12.0, 96.0, 6.4
_LOAD_CELL = (8.0, 9.0)  # of experts, which are many
_GAP, _PER_ROW, _STEP_LINE = 18.0, 6, 13.0  # of the small multiple
_LEAST_WIDTH = 470.0  # what the legend takes


@dataclass(frozen=True, slots=True)
class HeatKind:
    """What a heat map shows: its title, its numbers (S, L, C), and whether these are shares."""

    title: str
    numbers: Callable[[Overview], np.ndarray]
    is_share: bool = False


KINDS = {
    "norm": HeatKind("gradient norm ‖g‖", lambda o: o.norms),
    "ratio": HeatKind("update ratio ‖ΔW‖ / ‖W‖", lambda o: o.ratios),
    "zeros": HeatKind("share of zeros in the gradient", lambda o: o.zeros, is_share=True),
}


def kinds_of(o: Overview) -> list[str]:
    """The names of those KINDS of which an overview has numbers; of zeros, numbers above 0."""
    finite = {name: kind.numbers(o)[np.isfinite(kind.numbers(o))] for name, kind in KINDS.items()}
    return [name for name, x in finite.items() if x.size and (x.any() or not KINDS[name].is_share)]


def heat_map(o: Overview, kind: str = "norm", step: int | None = None) -> str:
    """One step of an overview, by default the last one; kind: a name of KINDS. Of updates the last
    step is taken that changed anything: a schedule may end at a rate of 0.

    The scale is that of all its steps, so that pictures of several can be compared.
    """
    numbers = KINDS[kind].numbers(o)
    last = _last_changed(numbers) if kind == "ratio" else len(o.steps) - 1
    s = last if step is None else o.steps.index(step)
    marks = layer_flags(o)[s]
    scale = _scale(o, kind)
    title = f"{KINDS[kind].title}, step {o.steps[s]:,}"
    head = 20 + _LETTER * max(len(column.module) for column in o.columns)
    left, top = _MARGIN + _LABEL, _MARGIN + 20 + head
    elements = [svg.text(_MARGIN, _MARGIN + 12, title, "title"), *_column_names(o, left, top)]
    for i, layer in enumerate(o.layers):
        y, mark = top + (i + 0.5) * _CELL[1] + 4, MARKS.get(Flag(marks[i]), "")
        elements.append(svg.text(left - 8, y, f"{mark} {_short(layer)}".strip(), "", "end"))
    elements += _cells(o, s, numbers[s], scale, left, top)
    elements += _marks(o, flags(o)[s], left, top)
    bottom = top + len(o.layers) * _CELL[1]
    used = sorted({*flags(o)[s].ravel().tolist(), *marks.tolist()} - {Flag.FINE})
    elements += _legend(scale, _MARGIN, bottom + 12)
    for i, flag in enumerate(used):
        words = f"{MARKS[Flag(flag)]}  {in_words(Flag(flag))}"
        elements.append(svg.text(_MARGIN, bottom + 64 + 16 * i, words))
    width = max(left + len(o.columns) * _CELL[0] + head / 2, _LEAST_WIDTH)
    return svg.picture(width, bottom + 58 + 16 * len(used), elements, title, STYLE)


def _last_changed(ratios: np.ndarray) -> int:
    """The last of S steps with a number that is not 0; the last of all without one."""
    changed = np.flatnonzero((np.isfinite(ratios) & (ratios != 0)).any(axis=(1, 2)))
    return int(changed[-1]) if len(changed) else len(ratios) - 1


def heat_steps(o: Overview, kind: str = "norm", most: int = 12) -> str:
    """Steps beside each other, as small maps with one scale: at most `most`, spread evenly."""
    numbers, scale = KINDS[kind].numbers(o), _scale(o, kind)
    chosen = sorted({round(i) for i in np.linspace(0, len(o.steps) - 1, most)})
    width = max(len(o.columns) * _SMALL[0], 56.0) + _GAP
    height = len(o.layers) * _SMALL[1] + _STEP_LINE + _GAP
    title, top = f"{KINDS[kind].title}, over steps", _MARGIN + 32
    elements = [svg.text(_MARGIN, _MARGIN + 12, title, "title")]
    for i, s in enumerate(chosen):
        x, y = _MARGIN + i % _PER_ROW * width, top + i // _PER_ROW * height
        elements.append(svg.text(x, y + 8, f"step {o.steps[s]:,}", "faint"))
        elements += _small_cells(o, s, numbers[s], scale, x, y + _STEP_LINE)
    bottom = top + ceil(len(chosen) / _PER_ROW) * height
    elements += _legend(scale, _MARGIN, bottom)
    whole = max(2 * _MARGIN + min(len(chosen), _PER_ROW) * width, _LEAST_WIDTH)
    return svg.picture(whole, bottom + 46, elements, title, STYLE)


def heat_load(load: np.ndarray, title: str) -> str:
    """How a mixture's experts are loaded: load (layers, experts), 1 where all are loaded alike."""
    (n_layers, n_experts), (w, h) = load.shape, _LOAD_CELL
    scale, places = Scale(0.0, float(load.max()), is_log=False), defaultdict[str, list[Point]](list)
    left, top = _MARGIN + _LABEL, _MARGIN + 40
    for i, e in np.ndindex(load.shape):
        places[scale.colour(float(load[i, e]))].append((left + e * w, top + i * h))
    elements = [svg.text(_MARGIN, _MARGIN + 12, title, "title")]
    elements += (svg.text(left + e * w, top - 6, str(e), "faint") for e in range(0, n_experts, 16))
    elements += (
        svg.text(left - 8, top + (i + 1) * h - 1, f"mixture {i}", "", "end")
        for i in range(0, n_layers, 2)
    )
    elements += (svg.tiles(at, w - 1, h - 1, colour) for colour, at in places.items())
    bottom = top + n_layers * h
    elements += _legend(scale, _MARGIN, bottom + 12)
    width = max(left + n_experts * w + _MARGIN, _LEAST_WIDTH)
    return svg.picture(width, bottom + 58, elements, title, STYLE)


def _scale(o: Overview, kind: str) -> Scale:
    if KINDS[kind].is_share:
        return Scale(0.0, 1.0, is_log=False)
    return Scale.logarithmic(KINDS[kind].numbers(o))


def _column_names(o: Overview, left: float, top: float) -> Iterator[str]:
    """Modules, aslant over their columns, and below them the letters of the factors."""
    at = 0
    for module, group in groupby(o.columns, key=lambda column: column.module):
        columns = list(group)
        x = left + (at + len(columns) / 2) * _CELL[0]
        yield svg.aslant(x - 2, top - 18, module)
        for i, column in enumerate(columns):
            middle = left + (at + i + 0.5) * _CELL[0]
            yield svg.text(middle, top - 5, column.factor, "faint", "middle")
        at += len(columns)


def _cells(
    o: Overview, s: int, numbers: np.ndarray, scale: Scale, left: float, top: float
) -> Iterator[str]:
    """A rectangle for every tensor; numbers (L, C) choose the colours."""
    w, h = _CELL
    for i, c in zip(*np.nonzero(o.there), strict=True):
        colour = _colour(o, s, scale, numbers, i, c)
        yield svg.tile(left + c * w, top + i * h, w - 1, h - 1, colour, _about(o, s, i, c))


def _small_cells(
    o: Overview, s: int, numbers: np.ndarray, scale: Scale, left: float, top: float
) -> Iterator[str]:
    """The same without words: one path for each colour, since there are many cells."""
    (w, h), places = _SMALL, defaultdict[str, list[Point]](list)
    for i, c in zip(*np.nonzero(o.there), strict=True):
        colour = _colour(o, s, scale, numbers, i, c)
        places[colour].append((left + c * w, top + i * h))
    return (svg.tiles(at, w - 1, h - 1, colour) for colour, at in places.items())


def _colour(o: Overview, s: int, scale: Scale, numbers: np.ndarray, i: int, c: int) -> str:
    """The class of a cell; a number may be unknown where the gradient is sound."""
    is_known = not np.isnan(numbers[i, c]) or not isfinite(o.norms[s, i, c])
    return scale.colour(numbers[i, c]) if is_known else "unknown"


def _about(o: Overview, s: int, i: int, c: int) -> str:
    """What the pointer shows of a cell."""
    lines = [f"{o.layers[i]} {o.columns[c]}, step {o.steps[s]:,}"]
    words = {"norm": "‖g‖", "ratio": "‖ΔW‖ / ‖W‖", "zeros": "zeros"}
    for name, word in words.items():
        x = KINDS[name].numbers(o)[s, i, c]
        if not np.isnan(x):
            lines.append(f"{word} {x:.1%}" if KINDS[name].is_share else f"{word} {x:.3g}")
    if not isfinite(o.norms[s, i, c]):
        lines.append("the gradient is not finite")
    return "\n".join(lines)


def _marks(o: Overview, flagged: np.ndarray, left: float, top: float) -> Iterator[str]:
    for i, c in zip(*np.nonzero(flagged), strict=True):
        x, y = left + (c + 0.5) * _CELL[0], top + (i + 0.5) * _CELL[1] + 4
        yield svg.text(x, y, MARKS[Flag(flagged[i, c])], "mark")


def _legend(scale: Scale, x: float, y: float) -> Iterator[str]:
    """The scale with its numbers, and the colour of 0."""
    w = 30.0
    for i in range(N_LEVELS):
        low, high = scale.at(i / N_LEVELS), scale.at((i + 1) / N_LEVELS)
        yield svg.tile(x + i * w, y, w, 12, f"h{i}", f"{low:.3g} to {high:.3g}")
    for part, label in scale.ticks():
        yield svg.text(x + part * N_LEVELS * w, y + 26, label, "faint", "middle")
    x += N_LEVELS * w + 44
    for colour, word in (("hz", "0"), ("hn", "not finite")):
        yield svg.tile(x, y, 14, 12, colour, word)
        yield svg.text(x + 20, y + 10, word)
        x += 52


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:13]}…"
