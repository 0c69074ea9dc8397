"""A text with the loss of every token as the colour behind it: an HTML fragment, and its parts.

STYLE belongs once into the page. Nothing of a text is markup, nor can it command the reader's
screen: control and format characters are shown by their numbers.
"""

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from html import escape
from math import exp, isnan
from typing import Protocol

import numpy as np

from pyggml.look.draw.svg import variables

LEVELS = (0.25, 0.5, 1.0, 2.0, 3.0, 4.5, 6.0, 8.0)  # losses at which the colour changes
# fmt: off
_LIGHT = ["#ffffff", "#fff7e0", "#ffedc2", "#ffdf9e", "#ffcc80", "#ffb56e", "#ff9d6b", "#ff8a75",
          "#ff7a85"]
_DARK = ["#14181f", "#262018", "#38291a", "#4c311b", "#61381c", "#77401f", "#8d4524", "#a1482e",
         "#b5423f"]
# fmt: on
_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
STYLE = f"""
.tokens {{ --ink: #1c2330; --faint: #66707f; {variables("t", _LIGHT)}
  color: var(--ink); font: 15px/1.9 ui-monospace, "Cascadia Mono", Menlo, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }}
@media (prefers-color-scheme: dark) {{
  .tokens {{ --ink: #f2f4f8; --faint: #9aa5b4; {variables("t", _DARK)} }} }}
{" ".join(f".tokens .t{i} {{ background: var(--t{i}); }}" for i in range(len(LEVELS) + 1))}
.tokens span {{ padding: 3px 0; border-radius: 3px; }}
.tokens .masked {{ color: var(--faint); text-decoration: underline dotted; }}
.tokens i {{ font-style: normal; opacity: 0.65; }}
.tokens .scale {{ font-size: 12px; margin: 0 0 8px; white-space: normal; }}
.tokens .scale span {{ padding: 3px 7px; }}
"""


class Table(Protocol):
    """How a model reads T tokens: pyggml.look.lens.TokenTable."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def losses(self) -> np.ndarray: ...
    @property
    def ranks(self) -> np.ndarray: ...
    @property
    def counted(self) -> np.ndarray: ...


def fragment(table: Table, pieces: Sequence[bytes]) -> str:
    """HTML of a text of T tokens, each with its bytes.

    The pointer shows a token's id, bytes, loss, probability and rank. Tokens that do not count are
    faint and underlined, without a colour.
    """
    spans = []
    for i, text in enumerate(texts(pieces)):
        kind = f"t{level(float(table.losses[i]))}" if table.counted[i] else "masked"
        about = _safe(about_token(table, pieces, i))
        spans.append(f'<span class="{kind}" title="{about}">{_mark(text)}</span>')
    return f'<div class="tokens">{_scale(table.counted)}<div>{"".join(spans)}</div></div>'


def level(loss: float) -> int:
    """0 to 8: how many of LEVELS a loss has reached; 0 for NaN."""
    return sum(loss >= limit for limit in LEVELS)


def texts(pieces: Sequence[bytes]) -> Iterator[str]:
    """Each token's characters. One that takes several tokens stands at the last of them, and the
    others are "‥"; bytes that are no UTF-8 become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i, piece in enumerate(pieces):
        text = decoder.decode(piece, final=i == len(pieces) - 1)
        yield "".join(map(_visible, text)) or ("‥" if piece else "")


def about_token(table: Table, pieces: Sequence[bytes], i: int) -> str:
    """Token i in words, one number a line."""
    lines = [f"token {table.ids[i]}  {pieces[i]!r}"[:160]]
    if not isnan(table.losses[i]):
        lines.append(f"loss {table.losses[i]:.3f}")
        lines.append(f"probability {exp(-table.losses[i]):.3g}")
        lines.append(f"rank {table.ranks[i] + 1:,}")
    return "\n".join([*lines, *["not counted"] * (not table.counted[i])])


def signs(text: str) -> str:
    """A text whose white space can be seen, but for single spaces before a word."""
    marked = "".join(_SIGNS.get(c, c) + "\n" * (c == "\n") for c in text)
    return f" {marked[1:]}" if marked[:1] == "·" and marked[1:2] not in ("", "·") else marked


def _visible(c: str) -> str:
    """A character, or the number of one that would act on the page instead of being shown."""
    acts = unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs") and c not in _SIGNS
    return f"⟨{ord(c):X}⟩" if acts else c


def _mark(text: str) -> str:
    """The same as HTML, signs for white space faint."""
    return "".join(f"<i>{c}</i>" if c in _SIGNS.values() else escape(c) for c in signs(text))


def _safe(text: str) -> str:
    return escape("".join(_visible(c) if c != "\n" else c for c in text))


def _scale(counted: np.ndarray) -> str:
    limits = ("0", *(f"{x:g}" for x in LEVELS))
    spans = "".join(f'<span class="t{i}">{x}</span>' for i, x in enumerate(limits))
    masked = ' <span class="masked">not counted</span>' if not counted[1:].all() else ""
    return f'<div class="scale">loss from {spans}{masked}</div>'
