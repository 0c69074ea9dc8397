"""Numbers and names as a reader wants them."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
_TO_COPY = ("use it", "resume")  # labels of rows that are commands, which a line end would cut
_LABEL = 11  # columns before the text of a row
_WARNINGS = ("warning", "skipped", "left out")  # labels of rows that --quiet leaves in
# Control characters, halves of pairs, and what reverses the direction of what follows.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_is_quiet = False
_progresses = 0  # contexts of `progress_lines` that are open
_recordings: list[list[tuple[str, str]]] = []


def set_quiet(value: bool) -> None:
    """From now on, leave out (or print) what is printed inside `progress_lines`."""
    global _is_quiet
    _is_quiet = value


def is_quiet() -> bool:
    return _is_quiet


@contextmanager
def progress_lines() -> Iterator[None]:
    """What is printed inside tells of the way, not of a result: --quiet leaves it out."""
    global _progresses
    _progresses += 1
    try:
        yield
    finally:
        _progresses -= 1


def has_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours, and the user wants them."""
    return stream.isatty() and wants_colours()


def wants_colours() -> bool:
    """Whether a terminal, if there is one, takes colours, and the user wants them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str = "", end: str = "\n", as_is: bool = False) -> None:
    """Print at once, also into a pipe. as_is: with the escapes that are in it, such as colours."""
    if not (_is_quiet and _progresses):
        print(text if as_is else printable(text), end=end, flush=True)


def say_progress(text: str, end: str = "\n", begin: str = "") -> None:
    """Print on standard error, where results are not; --quiet leaves it out."""
    if not _is_quiet:
        print(f"{begin}{printable(text)}", end=end, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """A line beside the output, on standard error."""
    print(wrap(f"note: {printable(text)}", sys.stderr), file=sys.stderr, flush=True)


def wrap(line: str, stream: TextIO, indent: int = 2) -> str:
    """A line as it is; for a terminal in lines that fit, so that no word is broken."""
    if not stream.isatty():
        return line
    width = max(shutil.get_terminal_size().columns, 3 * indent)
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    parts = (fill(part, width, subsequent_indent=indent * " ", **how) for part in line.split("\n"))
    return "\n".join(parts)


def row(label: str, text: str) -> None:
    """A line of a table with one word at its left."""
    text = printable(text)
    line = f"{label:<10} {text}"
    if label not in _TO_COPY:
        line = wrap(line, sys.stdout, _LABEL)
    if label in _WARNINGS:
        print(line, flush=True)
    else:
        say(line)
    for rows in _recordings:
        rows.append((label, text))


@contextmanager
def recorded_rows() -> Iterator[list[tuple[str, str]]]:
    """The rows that are printed inside, for the report of a run."""
    rows: list[tuple[str, str]] = []
    _recordings.append(rows)
    try:
        yield rows
    finally:
        _recordings.remove(rows)


def size(n: float) -> str:
    """Bytes in powers of 1000: 18.9 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def with_size(path: Path) -> str:
    """A file that is there, and its size: a.gguf, 18.9 MB."""
    return f"{path}, {size(path.stat().st_size)}"


def count(n: int) -> str:
    """A number of parameters: 29.4 M."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return str(n)


def plural(n: int, thing: str, things: str | None = None) -> str:
    """1 window, 1,370 windows."""
    return f"{n:,} {thing if n == 1 else things or thing + 's'}"


def percent(share: float | None) -> str:
    """A share of 1 with two digits at least: 0.31 %, 98 %, 100 %."""
    value = 100 * (share or 0.0)
    return f"{value:.2g} %" if abs(value) < 99.5 else f"{value:.0f} %"


def span(seconds: float) -> str:
    """A time in its two largest units: 40 ms, 4.2 s, 3 min 20 s, 5 h 2 min."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def speed(n: int, seconds: float) -> str:
    """Tokens a second, none where the clock stood still."""
    return f"{n / seconds if seconds else 0:.1f} tokens/s"


def printable(text: str) -> str:
    """Text or a name with what could command the terminal as escapes: \\x1b, \\u202e; so too the
    bytes of a name that are no UTF-8: \\xe4."""
    return _COMMANDS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte, as Python has it in names
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def unescape(text: str) -> str:
    r"""A prompt as llama.cpp reads it from a command line: \n, \t and \\ are one character."""
    return re.sub(r"\\([nt\\])", lambda match: _ESCAPES[match[1]], text)
