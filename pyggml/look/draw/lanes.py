"""A plan as a lane chart: which tensor lies where in the arena, and from when to when."""

from pyggml.alloc import Plan
from pyggml.graph import reachable
from pyggml.graph.op import SAVED, SHARED
from pyggml.graph.tensor import Tensor
from pyggml.look.draw import svg
from pyggml.look.draw.ticks import linear_labels, linear_ticks

_WIDTH, _HEIGHT, _MARGIN = 900.0, 420.0, 64.0
_LETTER = (4.0, 6.0)  # width of a letter in a lane; least height of a lane with letters
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def lanes(plan: Plan) -> str:
    """Nodes from left to right in the order of execution, bytes of the arena upwards.

    A rectangle is a tensor: as wide as it lives, as high as it is large. Its name stands in it
    where there is room.
    """
    n, total = max(len(plan.graph.nodes), 1), max(plan.n_bytes, 1)
    labels = []

    def lane(
        kind: str, about: str, offset: int, size: int, first: int, last: int, name: str
    ) -> str:
        x, y = _MARGIN + first / n * _WIDTH, _MARGIN + (1 - (offset + size) / total) * _HEIGHT
        width, height = (last - first + 1) / n * _WIDTH, size / total * _HEIGHT
        if height >= _LETTER[1] and width >= _LETTER[0] * len(name) + 8:
            labels.append(svg.text(x + 4, y + height / 2 + 2.4, name, "inlane"))
        where = f"{bytes_as(size)} at byte {offset:,}, nodes {first} to {last}"
        return svg.rectangle(x, y, width, height, kind, f"{about}\n{where}")

    result, *_ = plan.graph.outputs
    forward = set(reachable(result))
    elements = []
    for t, offset in plan.offsets.items():
        first, last = plan.lives[t].first, min(plan.lives[t].last, n - 1)
        kind = "forward" if t in forward else "backward"
        elements.append(lane(kind, repr(t), offset, t.n_bytes, first, last, _name(t)))
    for t, offset in plan.scratch.items():
        size = plan.n_scratch[t]
        about = f"scratch of {t!r}"
        at = plan.graph.places[t]
        elements.append(lane("scratch", about, offset, size, at, at, "scratch"))
    title = f"an arena of {bytes_as(total)} over {n} nodes"
    every = [*elements, *labels, *_axes(n, total), *_legend()]
    return svg.picture(_WIDTH + 2 * _MARGIN, _HEIGHT + 2 * _MARGIN, every, title)


def _axes(n: int, total: int) -> list[str]:
    bottom, right = _MARGIN + _HEIGHT, _MARGIN + _WIDTH
    elements = [svg.arrow([(_MARGIN, bottom), (right + 12, bottom)])]
    elements.append(svg.arrow([(_MARGIN, bottom), (_MARGIN, _MARGIN - 12)]))
    size, unit = next(((size, unit) for size, unit in _UNITS if total >= size), (1, "B"))
    ticks = linear_ticks(total / size)
    for tick, words in zip(ticks, linear_labels(ticks), strict=True):
        y = bottom - tick * size / total * _HEIGHT
        elements.append(svg.text(_MARGIN - 6, y + 4, f"{words} {unit}", "faint", "end"))
    numbers = linear_ticks(n)
    for tick, words in zip(numbers, linear_labels(numbers), strict=True):
        x = _MARGIN + tick / n * _WIDTH
        elements.append(svg.text(x, bottom + 16, words, "faint", "middle"))
    elements.append(svg.text(_MARGIN, _MARGIN - 42, "bytes of the arena", "title"))
    elements.append(svg.text(right, bottom + 34, "node, in the order of execution", "title", "end"))
    return elements


def _legend() -> list[str]:
    words = {"forward": "forward", "backward": "backward", "scratch": "scratch of one kernel"}
    elements = []
    for i, (kind, name) in enumerate(words.items()):
        x = _MARGIN + 200 + 130 * i
        elements.append(svg.rectangle(x, _MARGIN - 51, 11, 11, kind, name))
        elements.append(svg.text(x + 16, _MARGIN - 42, name))
    return elements


def _name(t: Tensor) -> str:
    """A tensor's name, or that of the op that makes it, or leaves it for the gradient."""
    if t.op in (SAVED, SHARED):
        return f"{_name(t.src[0])}, {t.op.name}"
    return t.name or (t.op.name if t.op else "")


def bytes_as(n: float) -> str:
    """12.5 MB"""
    for size, unit in _UNITS:
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.0f} B"
