"""`pyggml perplexity`: text → the running perplexity, then its final estimate and error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import click

import pyggml.threads
from pyggml import load
from pyggml.cli.options import PATH, SETTINGS, model_options
from pyggml.cli.show import plural, say, span
from pyggml.errors import DataError
from pyggml.lora import Perplexity, perplexity
from pyggml.lora.data import read_text


@click.command("perplexity", context_settings=SETTINGS)
@model_options
@click.option("-f", "--file", "text", type=PATH, required=True, help="UTF-8 text")
@click.option(
    "--ctx", type=click.IntRange(min=4), default=512, show_default=True, help="tokens of a chunk"
)
def command(
    model: Path, lora: Path | None, threads: int, compute: str, text: Path, ctx: int
) -> None:
    """How well a model predicts a text, as llama.cpp's tool of this name computes it."""
    opened = load(model, lora, compute)
    pyggml.threads.set(threads)
    began = perf_counter()
    words = read_text(text).removesuffix("\n")  # llama.cpp's -f drops one
    for so_far in _named(text, perplexity(opened, words, ctx)):
        if so_far.chunk == 1:
            whole = span((perf_counter() - began) * so_far.n_chunks)
            about = f"{plural(so_far.n_chunks, 'chunk')} of {ctx} tokens, some {whole}"
            print(about, file=sys.stderr, flush=True)
        say(f"[{so_far.chunk}]{so_far.value:.4f},", end="")
    say(f"\nFinal estimate: PPL = {so_far.value:.4f} +/- {so_far.error:.5f}")


def _named(path: Path, results: Iterator[Perplexity]) -> Iterator[Perplexity]:
    """The same, and errors that are the text's name its file."""
    try:
        yield from results
    except DataError as error:
        raise DataError(f"{path}: {error}; a smaller --ctx needs less") from None
