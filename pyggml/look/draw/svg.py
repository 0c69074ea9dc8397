"""Scalable pictures: elements as text. Colours are names of a style that knows light and dark."""

from collections.abc import Iterable
from html import escape

from pyggml.look.draw.layers import Point

# Of these pictures alone, also where one stands inside a page that has a style of its own.
STYLE = """
svg.drawn { --paper: #ffffff; --ink: #1c2330; --faint: #5d6674; --line: #8a94a3; --box: #eef2f7;
  --forward: #1f5fbf; --backward: #b3471b; --trained: #1d7f4e; --scratch: #7a4fb5;
  background: var(--paper); font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg.drawn { --paper: #14181f; --ink: #e6eaf0;
  --faint: #9aa5b4; --line: #6b7686; --box: #1f2630; --forward: #7db0ff; --backward: #ff9d70;
  --trained: #5fd394; --scratch: #c2a0f5; } }
.drawn text { fill: var(--ink); }
.drawn text.faint { fill: var(--faint); font-size: 10px; }
.drawn text.title { font-weight: 600; }
.drawn text.label { stroke: var(--paper); stroke-width: 3px; paint-order: stroke; }
.drawn text.inlane { fill: var(--paper); font-size: 7px; pointer-events: none; }
.drawn rect.input { stroke: var(--line); stroke-dasharray: 4 3; }
.drawn rect.box { fill: var(--box); stroke-width: 1.5; }
.drawn .forward { stroke: var(--forward); } .drawn .backward { stroke: var(--backward); }
.drawn .trained { stroke: var(--trained); }
.drawn rect.new { fill: color-mix(in srgb, var(--trained) 26%, var(--box)); }
.drawn rect.gone { fill: color-mix(in srgb, var(--backward) 26%, var(--box));
  stroke-dasharray: 4 3; }
.drawn path { fill: none; stroke: var(--line); stroke-width: 1; }
.drawn path.flow { stroke-width: 2; }
.drawn rect.lane { stroke: var(--paper); stroke-width: 0.3; }
.drawn rect.lane.forward { fill: var(--forward); }
.drawn rect.lane.backward { fill: var(--backward); }
.drawn rect.lane.scratch { fill: var(--scratch); }
"""


def variables(letter: str, colours: Iterable[str]) -> str:
    """A style's variables for the classes of a scale, which have this letter: --s0, --s1, …"""
    return " ".join(f"--{letter}{i}: {c};" for i, c in enumerate(colours))


_ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8" /></marker>'
)


def picture(
    width: float, height: float, elements: Iterable[str], title: str, style: str = STYLE
) -> str:
    """An svg element that stands alone; title: for those who cannot see it; style: STYLE, and maybe
    more behind it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>{style}</style><defs>{_ARROW}</defs>"
        f"{''.join(elements)}</svg>"
    )


def box(x: float, y: float, width: float, height: float, kind: str, about: str = "") -> str:
    """A box by its upper left corner; about: shown where the pointer rests."""
    tip = f"<title>{escape(about)}</title>" if about else ""
    return (
        f'<rect class="box {kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="5">{tip}</rect>'
    )


def part(kind: str, index: int, elements: Iterable[str]) -> str:
    """Elements that belong together: a page finds them as [data-KIND="INDEX"]."""
    return f'<g data-{kind}="{index}">{"".join(elements)}</g>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    start = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {start}>{escape(words)}</text>'


def arrow(points: Iterable[Point], kind: str = "") -> str:
    """A way through points, with a head at its end."""
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{way}" marker-end="url(#arrow)" />'


def rectangle(x: float, y: float, width: float, height: float, kind: str, about: str) -> str:
    return (
        f'<rect class="lane {kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}"><title>{escape(about)}</title></rect>'
    )


def tile(x: float, y: float, width: float, height: float, kind: str, about: str) -> str:
    """A rectangle without a line; about: shown where the pointer rests."""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{escape(about)}</title></rect>"
    )


def tiles(corners: Iterable[Point], width: float, height: float, kind: str) -> str:
    """Equal rectangles by their upper left corners, as one path."""
    ways = (f"M{x:.1f} {y:.1f}h{width:g}v{height:g}h{-width:g}z" for x, y in corners)
    return f'<path class="tiles {kind}" d="{"".join(ways)}" />'


def aslant(x: float, y: float, words: str) -> str:
    """Text that rises to the right from its start."""
    return f'<text transform="translate({x:.1f} {y:.1f}) rotate(-50)">{escape(words)}</text>'
