"""Nodes in layers, every node below its sources (Sugiyama et al. 1981, by igraph)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.errors import PyggmlError
from pyggml.extras import how_to_install
from pyggml.graph.tensor import Tensor

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layers:
    """Places in steps: of a node's width to the right, of a layer down.

    places   node → its centre
    ways     (source, reader) → the points from one to the other, both included
    """

    places: dict[Tensor, Point]
    ways: dict[tuple[Tensor, Tensor], list[Point]]

    @property
    def width(self) -> float:
        points = [p for way in self.ways.values() for p in way]
        return max((x for x, _ in (*points, *self.places.values())), default=0.0) + 1

    @property
    def height(self) -> float:
        return max((y for _, y in self.places.values()), default=0.0) + 1


def place_in_layers(nodes: Sequence[Tensor]) -> Layers:
    """The nodes in layers, with the edges among them; parts without an edge between them stand
    side by side, the largest first. Raises PyggmlError without igraph."""
    members = set(nodes)
    pairs = [(s, t) for t in nodes for s in dict.fromkeys(t.src) if s in members]
    places: dict[Tensor, Point] = {}
    ways: dict[tuple[Tensor, Tensor], list[Point]] = {}
    right = 0.0
    for part in _components(nodes, pairs):
        inside = set(part)
        part_layers = _layers(part, [pair for pair in pairs if pair[0] in inside])
        places |= {t: (x + right, y) for t, (x, y) in part_layers.places.items()}
        ways |= {pair: [(x + right, y) for x, y in way] for pair, way in part_layers.ways.items()}
        right += part_layers.width
    return Layers(places, ways)


def _components(
    nodes: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]
) -> list[list[Tensor]]:
    """The nodes in groups without an edge between them, the largest first."""
    group = {t: [t] for t in nodes}
    for s, t in pairs:
        one, other = group[s], group[t]
        if one is not other:
            one += other
            group |= dict.fromkeys(other, one)
    groups = {id(g): g for g in group.values()}
    return sorted(groups.values(), key=len, reverse=True)


def _layers(nodes: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]) -> Layers:
    """Nodes that hang together."""
    if not pairs:
        return Layers(dict.fromkeys(nodes, (0.0, 0.0)), {})
    number = {t: i for i, t in enumerate(nodes)}
    layout = (
        _igraph()
        .Graph(len(nodes), [(number[s], number[t]) for s, t in pairs], directed=True)
        .layout_sugiyama()
    )
    placed = iter(_spread([*layout.coords, *(p for way in layout.edge_routing for p in way)]))
    places = {t: next(placed) for t in nodes}
    ways = {
        (s, t): [places[s], *(next(placed) for _ in way), places[t]]
        for (s, t), way in zip(pairs, layout.edge_routing, strict=True)
    }
    return Layers(places, ways)


def _igraph() -> Any:
    try:
        import igraph
    except ImportError:
        raise PyggmlError(
            f"the inside of a graph is laid out by igraph: {how_to_install('views')}"
        ) from None
    return igraph


def _spread(points: Sequence[Sequence[float]]) -> list[Point]:
    """The points at least a step apart in each layer, and none left of 0."""
    left = min(x for x, _ in points)
    spread = [(0.0, 0.0)] * len(points)
    last: dict[float, float] = {}  # layer → x of its rightmost point
    for i in sorted(range(len(points)), key=lambda i: (points[i][1], points[i][0])):
        x, y = points[i]
        last[y] = max(x - left, last[y] + 1) if y in last else x - left
        spread[i] = (last[y], y)
    return spread
