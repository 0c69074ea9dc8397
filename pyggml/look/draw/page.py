"""A graph as a page of its own: overview, the inside of every section, and the plan; no network."""

from collections.abc import Collection
from html import escape

from pyggml.alloc import Plan
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.look.draw.fold import Section, forward_tensors, sections
from pyggml.look.draw.graph import inside, is_small, picture
from pyggml.look.draw.lanes import bytes_as, lanes

_STYLE = """
body { margin: 1.5rem; font: 15px/1.45 system-ui, sans-serif; background: #fff; color: #1c2330; }
@media (prefers-color-scheme: dark) { body { background: #14181f; color: #e6eaf0; } }
details { margin: 0.4rem 0; } summary { cursor: pointer; padding: 0.3rem 0; font-weight: 600; }
summary:focus-visible { outline: 3px solid #4c8bf5; }
.side { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
body > div, .side > div { overflow: auto; max-width: 100%; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; }
"""


def page(graph: Graph, plan: Plan | None = None) -> str:
    """HTML that needs nothing else. Raises PyggmlError without igraph."""
    title = f"{len(graph.nodes)} nodes, {len(graph.leaves)} leaves"
    parts = [f"<h1>{escape(title)}</h1>", f"<div>{picture(graph)}</div>"]
    if not is_small(graph):
        forward = forward_tensors(graph)
        parts += ["<h2>Inside</h2>", *(_inside(each, forward) for each in sections(graph))]
    if plan is not None:
        parts.append(f"<h2>Memory: an arena of {bytes_as(plan.n_bytes)}</h2>")
        parts.append(f"<div>{lanes(plan)}</div>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>"
    )


def _inside(section: Section, forward: Collection[Tensor]) -> str:
    name = f"{section.title} ×{section.n}" if section.n > 1 else section.title
    directions = {"forward": section.forward, "backward": section.backward}
    drawn = "".join(
        f"<div>{inside(t, way, forward=forward)}</div>" for way, t in directions.items() if t
    )
    return f"<details><summary>{escape(name)}</summary><div class=side>{drawn}</div></details>"
