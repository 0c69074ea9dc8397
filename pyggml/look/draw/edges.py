"""Edges between the parts of a model as a picture: blocks upwards, what a part hears from below."""

from collections.abc import Iterator, Sequence

from pyggml.look.draw import svg

_BOX, _GAP, _ROW, _MARGIN, _LETTER = 22.0, 14.0, 62.0, 14.0, 6.6
_SIDE = 110.0  # beside the heads, for the feed-forward parts
_LAST = 1 << 20  # the row of the logits
_TITLE = "circuit"
_FFN = 2  # their row in a block, above keys and values and heads
_STYLE = (
    svg.STYLE
    + """
.drawn path.edge { stroke: #2166ac; stroke-linecap: round; opacity: 0.75; }
.drawn path.edge.negative { stroke: #c0392b; }
@media (prefers-color-scheme: dark) { .drawn path.edge { stroke: #7cc0f5; }
  .drawn path.edge.negative { stroke: #ff7a6b; } }
.drawn rect.box { stroke: var(--line); }
"""
)
Point = tuple[float, float]


def edges_picture(edges: Sequence[tuple[str, str, float]], links: Sequence[tuple[str, str]]) -> str:
    """An SVG picture of edges: sender, receiver, score; blue where it is above 0, red below, as
    wide as it is large. The pointer shows names and scores.

    links: receivers that stand apart from what is made of what they read, such as shared keys
    """
    names = dict.fromkeys(node_of(name) for s, r, _ in edges for name in (s, r))
    rows: dict[tuple[int, int], list[str]] = {}
    for name in sorted(names, key=_place):
        rows.setdefault(_place(name)[:2], []).append(name)
    widths = {row: sum(map(_width, nodes)) + _GAP * (len(nodes) - 1) for row, nodes in rows.items()}
    widest = max(_width("embedding"), *(w for row, w in widths.items() if row[1] < _FFN))
    width = max(widest + 2 * _SIDE, _LETTER * len(_TITLE)) + 2 * _MARGIN
    height = 40 + _ROW * len(rows)
    places: dict[str, Point] = {}
    for i, (row, nodes) in enumerate(rows.items()):
        x, y = (width - widths[row]) / 2, height - _ROW * (i + 1) + 12
        if row[1] == _FFN:
            x += (widest + _SIDE) / 2 + row[0] % 2 * _BOX
        elif 0 <= row[0] < _LAST:  # so that lines to further blocks are seen
            x += (row[0] % 3 - 1) * _BOX
        for name in nodes:
            places[name] = x + _width(name) / 2, y
            x += _width(name) + _GAP
    most = max((abs(x) for *_, x in edges), default=1.0)
    elements = [svg.text(_MARGIN, 22, _TITLE, "title")]
    elements += _links(links, places)
    elements += _lines(edges, places, most or 1.0)
    elements += _boxes(places)
    return svg.picture(width, height, elements, _TITLE, _STYLE)


def node_of(name: str) -> str:
    """The part that a sender or a receiver belongs to: "3.1" for a head, "k 3.0" for keys that
    several heads share, "ffn 3"."""
    if not name.startswith("blk."):
        return {"token_embd": "embedding"}.get(name, name)
    layer, part = name.split(".")[1:3]
    if part == "attn_head":
        return f"{layer}.{name.split('.')[3]}"
    if part.startswith("ffn"):
        return f"ffn {layer}"
    head = part[2:-1]
    return f"{layer}.{head}" if part[0] == "q" else f"{part[0]} {layer}.{head}"


def _place(node: str) -> tuple[int, int, str, int]:
    """Row from below, row within a block, then the order in the row."""
    if node in ("embedding", "logits"):
        return (-1, 0, "", 0) if node == "embedding" else (_LAST, 0, "", 0)
    kind, _, number = node.rpartition(" ")
    layer, _, head = number.partition(".")
    return int(layer), {"ffn": _FFN, "": 1}.get(kind, 0), kind, int(head or 0)


def _width(node: str) -> float:
    return _LETTER * len(node) + 12


def _lines(
    edges: Sequence[tuple[str, str, float]], places: dict[str, Point], most: float
) -> Iterator[str]:
    for sender, receiver, score in sorted(edges, key=lambda edge: abs(edge[2])):
        (x, y), (to_x, to_y) = places[node_of(sender)], places[node_of(receiver)]
        start, end, lift = y - _BOX / 2, to_y + _BOX / 2, (y - to_y) / 2
        about = f"{sender} → {receiver}: {score:+.4g}"
        kind, wide = "edge negative" if score < 0 else "edge", 0.6 + 5 * abs(score) / most
        way = f"M{x:.1f} {start:.1f}C{x:.1f} {start - lift:.1f} {to_x:.1f} {end + lift:.1f}"
        yield (
            f'<path class="{kind}" d="{way} {to_x:.1f} {end:.1f}" '
            f'style="stroke-width:{wide:.2f}"><title>{about}</title></path>'
        )


def _links(links: Sequence[tuple[str, str]], places: dict[str, Point]) -> Iterator[str]:
    for name, reader in links:
        (x, y), (to_x, to_y) = places[node_of(name)], places[node_of(reader)]
        if node_of(name) != node_of(reader):
            way = f"M{x:.1f} {y - _BOX / 2:.1f}L{to_x:.1f} {to_y + _BOX / 2:.1f}"
            yield f'<path d="{way}" stroke-dasharray="3 3" />'


def _boxes(places: dict[str, Point]) -> Iterator[str]:
    for name, (x, y) in places.items():
        w = _width(name)
        yield svg.box(x - w / 2, y - _BOX / 2, w, _BOX, "", name)
        yield svg.text(x, y + 4, name, "", "middle")
