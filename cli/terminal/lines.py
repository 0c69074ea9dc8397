"""Tables of words, and one of which classes are taken for which."""

from collections.abc import Sequence

from pyggml.cli.terminal.show import percent, printable, say
from pyggml.look.confusion import Confusion

Line = tuple[str, ...]
_MOST = 20  # characters of a label


def say_lines(lines: Sequence[Line]) -> None:
    """Print lines of as many words, in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        say("   ".join(cells).rstrip())


def confusion_lines(confusion: Confusion, names: Sequence[str]) -> list[Line]:
    """A line for each class: what its texts were taken for, and how well it is told."""
    called = [printable(name)[:_MOST] for name in names]
    lines: list[Line] = [("is, taken for", *called, "precision", "recall", "F1")]
    shares = zip(confusion.precision, confusion.recall, confusion.f1, strict=True)
    for name, counts, three in zip(called, confusion.counts.tolist(), shares, strict=True):
        lines.append((name, *map(str, counts), *map(percent, three)))
    return lines
