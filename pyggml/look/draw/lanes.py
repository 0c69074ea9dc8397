"""A plan as a lane chart: which tensor lies where in the arena, and from when to when."""

from pyggml.alloc import Plan
from pyggml.graph.op import SAVED, SHARED
from pyggml.graph.tensor import Tensor
from pyggml.look.draw import svg
from pyggml.look.draw.fold import forward_tensors
from pyggml.look.draw.ticks import linear_labels, linear_ticks

WIDTH, _HEIGHT, MARGIN = 900.0, 420.0, 64.0
_NARROW = 480.0  # below it the legend has a line of its own
_LETTER = (4.0, 6.0)  # width of a letter in a lane; least height of a lane with letters
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def lanes(plan: Plan, wide: float = WIDTH) -> str:
    """Nodes from left to right in the order of execution, bytes of the arena upwards.

    A rectangle is a tensor: as wide as it lives, as high as it is large. Its name stands in it
    where there is room. wide: the length of the axis of nodes, between margins of MARGIN.
    """
    n, total = max(len(plan.graph.nodes), 1), max(plan.n_bytes, 1)
    labels = []

    def lane(
        kind: str, about: str, offset: int, size: int, first: int, last: int, name: str
    ) -> str:
        x, y = MARGIN + first / n * wide, MARGIN + (1 - (offset + size) / total) * _HEIGHT
        width, height = (last - first + 1) / n * wide, size / total * _HEIGHT
        if height >= _LETTER[1] and width >= _LETTER[0] * len(name) + 8:
            labels.append(svg.text(x + 4, y + height / 2 + 2.4, name, "inlane"))
        where = f"{bytes_as(size)} at byte {offset:,}, nodes {first} to {last}"
        return svg.rectangle(x, y, width, height, kind, f"{about}\n{where}")

    forward = forward_tensors(plan.graph)
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
    every = [*elements, *labels, *_axes(n, total, wide), *_legend(wide)]
    return svg.picture(wide + 2 * MARGIN, _HEIGHT + 2 * MARGIN, every, title)


def _axes(n: int, total: int, wide: float) -> list[str]:
    bottom, right = MARGIN + _HEIGHT, MARGIN + wide
    elements = [svg.arrow([(MARGIN, bottom), (right + 12, bottom)])]
    elements.append(svg.arrow([(MARGIN, bottom), (MARGIN, MARGIN - 12)]))
    size, unit = next(((size, unit) for size, unit in _UNITS if total >= size), (1, "B"))
    ticks = linear_ticks(total / size)
    for tick, words in zip(ticks, linear_labels(ticks), strict=True):
        y = bottom - tick * size / total * _HEIGHT
        elements.append(svg.text(MARGIN - 6, y + 4, f"{words} {unit}", "faint", "end"))
    numbers = linear_ticks(n)
    for tick, words in zip(numbers, linear_labels(numbers), strict=True):
        x = MARGIN + tick / n * wide
        elements.append(svg.text(x, bottom + 16, words, "faint", "middle"))
    top = MARGIN - (50 if wide < _NARROW else 42)
    elements.append(svg.text(MARGIN, top, "bytes of the arena", "title"))
    elements.append(svg.text(right, bottom + 34, "node, in the order of execution", "title", "end"))
    return elements


def _legend(wide: float) -> list[str]:
    words = {"forward": "forward", "backward": "backward", "scratch": "scratch of one kernel"}
    elements = []
    left, step, y = (0, 80, MARGIN - 34) if wide < _NARROW else (200, 130, MARGIN - 42)
    for i, (kind, name) in enumerate(words.items()):
        x = MARGIN + left + step * i
        elements.append(svg.rectangle(x, y - 9, 11, 11, kind, name))
        elements.append(svg.text(x + 16, y, kind if wide < _NARROW else name))
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
