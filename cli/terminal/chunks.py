"""Options of what perplexity and imatrix read: a text, in chunks."""

from collections.abc import Callable
from typing import Any

import click

from pyggml.cli.terminal.hub import held_out_files
from pyggml.cli.terminal.options import PATH, in_group


def held_out_option(about: str) -> Callable[[Any], Any]:
    """--file, which the command gets as `text`."""
    return click.option(
        *("-f", "--file", "text"),
        type=PATH,
        required=True,
        callback=held_out_files,
        **in_group("data"),
        help=about,
    )


def chunk_option(least: int) -> Callable[[Any], Any]:
    """--ctx: the tokens of a chunk."""
    return click.option(
        "--ctx",
        type=click.IntRange(min=least),
        metavar="N",
        default=512,
        show_default=True,
        **in_group("data", aliases=("ctx-size",)),
        help="tokens of a chunk",
    )
