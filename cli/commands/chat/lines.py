"""Lines from whoever is at standard input: with a prompt and editing at a terminal."""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress

from pyggml.cli.terminal.show import say, wants_colours

END_KEYS = "Ctrl-Z, Enter" if sys.platform == "win32" else "Ctrl-D"  # end input at a terminal


def read_messages(interactive: bool) -> Iterator[str]:
    """What is said, until the input ends. A line that ends with \\ goes on in the next one.

    interactive: at a terminal; Ctrl-C there takes back what was typed. Empty lines are no messages.
    """
    edits = False
    if interactive:
        with suppress(ImportError):  # Windows has its own editing of lines
            import readline  # noqa: F401  # its import alone gives `input` arrows and a history

            edits = True
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    so_far, ended = "", False
    while not ended:
        try:
            line = input(_prompt(". " if so_far else "> ", edits) if interactive else "")
        except EOFError:
            line, ended = "", True
        except KeyboardInterrupt:
            if not interactive:
                raise
            so_far = ""
            say(f"\n({END_KEYS} ends the chat)")
            continue
        if line.endswith("\\") and not ended:
            so_far += line[:-1] + "\n"
            continue
        message, so_far = so_far + line, ""
        if message.strip():
            yield message
    if interactive:
        say("")


def _prompt(text: str, edits: bool) -> str:
    """In green where readline edits lines: between \\x01 and \\x02 stands what takes no columns."""
    if not edits or not wants_colours():
        return text
    return f"\x01\x1b[32;1m\x02{text}\x01\x1b[0m\x02"
