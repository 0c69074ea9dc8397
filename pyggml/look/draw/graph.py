"""A graph as a picture: its sections one below the other, forward on the left, backward beside it.

Equal blocks are one section. The inside of a section is a picture of its own. Of a small graph,
every node is drawn.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from textwrap import wrap
from types import MappingProxyType

from pyggml.graph import Graph
from pyggml.graph.arrays import has_memory, read
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor
from pyggml.look.draw import svg
from pyggml.look.draw.fold import Section, forward_tensors, op_counts, sections
from pyggml.look.draw.layers import place_in_layers

_WIDTH, _GAP, _LINE = 330.0, 46.0, 15.0  # of a section's box; between boxes; of a line of text
_NODE, _LAYER = (142.0, 34.0), 66.0  # size of a node's box; from layer to layer
_COLUMN = 164.0  # from node to node
_MARGIN = 16.0
_AT = re.compile(r"blk\.\d+\.|\.weight")  # what every name in a block has
_PER_LINE = 48  # characters
_SMALL = 40  # nodes and leaves that are drawn one by one
_NO_MARKS: Mapping[Tensor, str] = MappingProxyType({})


def overview(graph: Graph) -> str:
    """The sections of a graph: how many blocks, which ops, what flows between them."""
    parts = sections(graph)
    has_backward = any(s.backward for s in parts)
    elements, y = [], 2 * _MARGIN + _LINE
    left, right = _MARGIN, _MARGIN + _WIDTH + _GAP
    elements.append(svg.text(left, _MARGIN + _LINE / 2, "forward", "title"))
    if has_backward:
        elements.append(svg.text(right, _MARGIN + _LINE / 2, "backward", "title"))
    for i, section in enumerate(parts):
        lines = [_lines(section.forward), _lines(section.backward)]
        height = (max(map(len, lines)) + 1) * _LINE + 14
        columns = ((left, "forward", section.forward), (right, "backward", section.backward))
        for (x, kind, nodes), words in zip(columns, lines, strict=True):
            if nodes:
                box = _section(x, y, height, kind, _title(section), words)
                elements.append(svg.part("section", i, box))
        if i + 1 < len(parts):
            elements += _flow(section, parts[i + 1], left, right, y + height)
        y += height + _GAP
    width = _MARGIN + _WIDTH + ((_GAP + _WIDTH) if has_backward else 0) + _MARGIN
    return svg.picture(width, y - _GAP + _MARGIN, elements, "the graph, block by block")


def inside(
    nodes: Sequence[Tensor],
    kind: str,
    trained: Collection[Tensor] = (),
    forward: Collection[Tensor] = (),
    marks: Mapping[Tensor, str] = _NO_MARKS,
) -> str:
    """The nodes of a section, and what they read of other sections: the residual stream, or its
    gradient. kind: "forward" or "backward". Edges tell shape and type.

    forward: the forward nodes, which a backward section reads too often to draw; the pointer shows
    them. Node i is [data-node="i"], section i of an overview [data-section="i"]. marks: of nodes
    that a pass makes, "new", or takes away, "gone".
    """
    own = set(nodes)
    sources = (s for t in nodes for s in t.src if s.op is not None and s not in own)
    inputs = [s for s in dict.fromkeys(sources) if kind == "forward" or s not in forward]
    kinds = [_with_mark("trained" if _reads(t, trained) else kind, t, marks) for t in nodes]
    title = f"{len(nodes)} {kind} nodes, {len(inputs)} inputs"
    return _nodes((*nodes, *inputs), [*kinds, *["input"] * len(inputs)], title)


def every(graph: Graph, marks: Mapping[Tensor, str] = _NO_MARKS) -> str:
    """Every node of a graph with its leaves, for graphs of a few dozen: forward and backward.

    Leaves are first among [data-node="i"]. marks: as `inside` has them.
    """
    forward = forward_tensors(graph)
    tensors = (*graph.leaves, *graph.nodes)
    of_nodes = [
        _with_mark("forward" if t in forward else "backward", t, marks) for t in graph.nodes
    ]
    return _nodes(tensors, ["leaf"] * len(graph.leaves) + of_nodes, f"{len(graph.nodes)} nodes")


def picture(graph: Graph) -> str:
    """What stands for a graph: every node of a small one, where igraph is there; else sections."""
    return every(graph) if is_small(graph) else overview(graph)


def is_small(graph: Graph) -> bool:
    """Whether every node is drawn: of a few dozen, where igraph is there."""
    return len(graph.nodes) + len(graph.leaves) <= _SMALL and find_spec("igraph") is not None


def _nodes(nodes: Sequence[Tensor], kinds: Sequence[str], title: str) -> str:
    layers = place_in_layers(nodes)
    elements = []
    for way in layers.ways.values():
        points = [(_x(x), _y(y)) for x, y in way]
        points[0] = (points[0][0], points[0][1] + _NODE[1] / 2)
        points[-1] = (points[-1][0], points[-1][1] - _NODE[1] / 2)
        elements.append(svg.arrow(points))
    for source in dict.fromkeys(source for source, _ in layers.ways):  # one, however many read it
        x, y = layers.places[source]
        elements.append(
            svg.text(_x(x) + 4, _y(y) + _NODE[1] / 2 + 12, _shape(source), "faint label")
        )
    for i, (t, kind) in enumerate(zip(nodes, kinds, strict=True)):
        x, y = layers.places[t]
        box = _node(t, _x(x), _y(y), kind)
        elements += box if kind == "input" else [svg.part("node", i, box)]
    width, height = layers.width * _COLUMN + 2 * _MARGIN, layers.height * _LAYER + 2 * _MARGIN
    return svg.picture(width, height, elements, title)


def _x(steps: float) -> float:
    return _MARGIN + (steps + 0.5) * _COLUMN


def _y(layers: float) -> float:
    return _MARGIN + layers * _LAYER + _NODE[1] / 2


def _title(section: Section) -> str:
    return f"{section.title}  ×{section.n}" if section.n > 1 else section.title


def _lines(nodes: Sequence[Tensor]) -> list[str]:
    """What a section computes, in lines: op and how often."""
    words = (f"{name} ×{n}" if n > 1 else name for name, n in op_counts(nodes))
    return wrap(",  ".join(w.replace(" ", "\u00a0") for w in words), _PER_LINE)


def _section(
    x: float, y: float, height: float, kind: str, title: str, lines: Sequence[str]
) -> list[str]:
    elements = [svg.box(x, y, _WIDTH, height, kind), svg.text(x + 10, y + 18, title, "title")]
    return elements + [svg.text(x + 10, y + 18 + (i + 1) * _LINE, w) for i, w in enumerate(lines)]


def _flow(above: Section, below: Section, left: float, right: float, y: float) -> list[str]:
    """The residual stream down, and its gradient, of the same shape, up."""
    elements = []
    stream = stream_between(above.forward, below.forward)
    x = left + _WIDTH / 2
    elements.append(svg.arrow([(x, y), (x, y + _GAP)], "flow forward"))
    elements.append(svg.text(x + 8, y + _GAP / 2 + 4, stream, "faint"))
    if above.backward and below.backward:
        x = right + _WIDTH / 2
        elements.append(svg.arrow([(x, y + _GAP), (x, y)], "flow backward"))
        elements.append(svg.text(x + 8, y + _GAP / 2 + 4, stream, "faint"))
    return elements


def stream_between(results: Sequence[Tensor], read: Sequence[Tensor]) -> str:
    """The shape and type of what the second nodes read first of the first ones. They do not read
    those of a folded section, which are an earlier block's; then it is that of the last one."""
    reached = set(results)
    known_source = next((s for t in read for s in t.src if s in reached), None)
    return _shape(known_source or results[-1]) if results else ""


def _node(t: Tensor, x: float, y: float, kind: str) -> list[str]:
    w, h = _NODE
    made_by = t.op.name if t.op else "leaf"
    below = "  ".join(filter(None, (_AT.sub("", t.name), constants(t))))
    label = [svg.text(x, y + (-2 if below else 4), made_by, "title", "middle")]
    if below:
        label.append(svg.text(x, y + 11, _short(below), "faint", "middle"))
    return [svg.box(x - w / 2, y - h / 2, w, h, kind, _about(t)), *label]


def constants(t: Tensor) -> str:
    """The numbers and words that an op was built with, or that a leaf of one element holds: s 2."""
    if t.op is None:
        is_one = t.n_elements == 1 and t.dtype in (F32, I32) and has_memory(t)
        return f"{read(t).item():.6g}" if is_one else ""
    plain = {name: x for name, x in t.params.items() if isinstance(x, bool | int | float | str)}
    return ", ".join(f"{k} {v:.6g}" if type(v) is float else f"{k} {v}" for k, v in plain.items())


def _about(t: Tensor) -> str:
    read_ones = [f"reads {s!r}" for s in t.src]
    words = constants(t)
    return "\n".join([repr(t), *([f"constants {words}"] if words else []), *read_ones])


def _with_mark(kind: str, t: Tensor, marks: Mapping[Tensor, str]) -> str:
    return f"{kind} {marks[t]}" if t in marks else kind


def _reads(t: Tensor, trained: Collection[Tensor]) -> bool:
    return any(s in trained for s in t.src)


def _shape(t: Tensor) -> str:
    return f"{t.dtype}{list(t.shape)}"


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:20]}…"
