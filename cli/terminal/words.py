"""A text on a terminal, and a level from 0 to 8 of every piece: its colour, or a bar below it."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from pyggml.cli.terminal.show import printable

Word = tuple[str, int]

_BARS = " ▁▂▃▄▅▆▇█"
# From yellow to red, of the 256 colours that terminals have; black letters are read on all of them.
_BACKGROUND = (230, 229, 228, 222, 221, 215, 209, 203)


def coloured_lines(words: Sequence[Word], width: int, has_colour: bool) -> Iterator[Text]:
    """Lines within the width, and what their colours or bars mean. Level −1 has none."""
    for line in _lines(words, width):
        if has_colour:
            yield Text.assemble(*((text, _style(level)) for text, level in line))
            continue
        yield Text("".join(text for text, _ in line))
        yield Text("".join(_BARS[max(level, 0)] * cell_len(text) for text, level in line))
    yield _legend(has_colour)


def _style(level: int) -> Style:
    if level < 1:
        return Style(dim=level < 0)
    return Style(color="color(16)", bgcolor=f"color({_BACKGROUND[level - 1]})")


def _legend(has_colour: bool) -> Text:
    from pyggml.look.draw.tokens import LEVELS

    limits = [f"{limit:g}" for limit in LEVELS]
    if has_colour:
        shown = ((f" {limit} ", _style(i)) for i, limit in enumerate(limits, 1))
        return Text.assemble(("loss from ", "dim"), *shown)
    bars = ", ".join(f"{_BARS[i]} {limit}" for i, limit in enumerate(limits, 1))
    return Text(f"loss from {bars}", style="dim")


def _lines(words: Iterable[Word], width: int) -> Iterator[list[Word]]:
    """Words in lines of at most this width; one that is wider is cut."""
    line: list[Word] = []
    used = 0
    for text, level in words:
        for piece, ends in _pieces(printable(text), width):
            if line and used + cell_len(piece) > width:
                yield line
                line, used = [], 0
            line.append((piece, level))
            used += cell_len(piece)
            if ends:
                yield line
                line, used = [], 0
    if line:
        yield line


def _pieces(text: str, width: int) -> Iterator[tuple[str, bool]]:
    """Parts without a line's end that fit, and whether a line ends behind each."""
    for part in text.splitlines(keepends=True):
        body = part.rstrip("\n")
        cuts = [body[i : i + width // 2] for i in range(0, len(body), width // 2)] or [""]
        for i, cut in enumerate(cuts):
            yield cut, part.endswith("\n") and i == len(cuts) - 1
