"""A plan as a lane chart: which tensor lies where in the arena, and from when to when."""

from pyggml.alloc import Plan
from pyggml.graph import reachable
from pyggml.look.draw import svg

_WIDTH, _HEIGHT, _MARGIN = 900.0, 420.0, 64.0
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def lanes(plan: Plan) -> str:
    """Nodes from left to right in the order of execution, bytes of the arena upwards.

    A rectangle is a tensor: as wide as it lives, as high as it is large.
    """
    n, total = max(len(plan.graph.nodes), 1), max(plan.n_bytes, 1)

    def lane(kind: str, about: str, offset: int, size: int, first: int, last: int) -> str:
        return svg.rectangle(
            _MARGIN + first / n * _WIDTH,
            _MARGIN + (1 - (offset + size) / total) * _HEIGHT,
            (last - first + 1) / n * _WIDTH,
            size / total * _HEIGHT,
            kind,
            f"{about}\n{bytes_as(size)} at byte {offset:,}, nodes {first} to {last}",
        )

    result, *_ = plan.graph.outputs
    forward = set(reachable(result))
    elements = []
    for t, offset in plan.offsets.items():
        first, last = plan.lives[t].first, min(plan.lives[t].last, n - 1)
        kind = "forward" if t in forward else "backward"
        elements.append(lane(kind, repr(t), offset, t.n_bytes, first, last))
    at = {t: i for i, t in enumerate(plan.graph.nodes)}
    for t, offset in plan.scratch.items():
        size = plan.n_scratch[t]
        elements.append(lane("scratch", f"scratch of {t!r}", offset, size, at[t], at[t]))
    title = f"an arena of {bytes_as(total)} over {n} nodes"
    every = [*elements, *_axes(n, total), *_legend()]
    return svg.picture(_WIDTH + 2 * _MARGIN, _HEIGHT + 2 * _MARGIN, every, title)


def _axes(n: int, total: int) -> list[str]:
    bottom, right = _MARGIN + _HEIGHT, _MARGIN + _WIDTH
    elements = [svg.arrow([(_MARGIN, bottom), (right + 12, bottom)])]
    elements.append(svg.arrow([(_MARGIN, bottom), (_MARGIN, _MARGIN - 12)]))
    for part in (0.25, 0.5, 0.75, 1.0):
        y = bottom - part * _HEIGHT
        elements.append(svg.text(_MARGIN - 6, y + 4, bytes_as(part * total), "faint", "end"))
        x = _MARGIN + part * _WIDTH
        elements.append(svg.text(x, bottom + 16, f"{part * n:.0f}", "faint", "middle"))
    elements.append(svg.text(_MARGIN, _MARGIN - 24, "bytes of the arena", "title"))
    elements.append(svg.text(right, bottom + 34, "node, in the order of execution", "title", "end"))
    return elements


def _legend() -> list[str]:
    words = {"forward": "forward", "backward": "backward", "scratch": "scratch of one kernel"}
    elements = []
    for i, (kind, name) in enumerate(words.items()):
        x = _MARGIN + 200 + 130 * i
        elements.append(svg.rectangle(x, _MARGIN - 33, 11, 11, kind, name))
        elements.append(svg.text(x + 16, _MARGIN - 24, name))
    return elements


def bytes_as(n: float) -> str:
    """12.5 MB"""
    for size, unit in _UNITS:
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.0f} B"
