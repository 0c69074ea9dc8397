"""`pyggml perplexity`: text → the running perplexity, then its final estimate and error."""

from collections.abc import Iterator
from pathlib import Path

import click

from pyggml import Model
from pyggml.cli.terminal.chat_templates import choose_template
from pyggml.cli.terminal.chunks import chunk_option, held_out_option
from pyggml.cli.terminal.help import GroupedCommand
from pyggml.cli.terminal.options import SETTINGS, ModelSource, in_group, model_options
from pyggml.cli.terminal.paths import check_text
from pyggml.cli.terminal.progress import Countdown
from pyggml.cli.terminal.show import note, plural, progress_lines, say, say_progress
from pyggml.errors import DataError
from pyggml.lora import Perplexity, perplexity
from pyggml.lora.config import SPECIAL_TOKENS, DataConfig
from pyggml.lora.data import Dataset, Encoding, TextRow, encode_rows, pack, read_rows
from pyggml.lora.data.rows import ChatRow


@click.command(
    "perplexity",
    cls=GroupedCommand,
    context_settings=SETTINGS,
    examples=[
        "pyggml perplexity -m model.gguf -f wiki.test.raw",
        "pyggml perplexity -m model.gguf --lora adapter.gguf -f text.txt --ctx 2048",
        "pyggml perplexity -m model.gguf -f chats.jsonl",
    ],
)
@model_options
@held_out_option("UTF-8 text, or rows as for finetune")
@chunk_option(least=4)
@click.option(
    "--special-tokens",
    type=click.Choice(SPECIAL_TOKENS),
    metavar="WORD",
    default="auto",
    show_default=True,
    **in_group("data"),
    help="special tokens in the text: auto, plain or parse, as for finetune; auto parses rows, and "
    "reads plain text as plain",
)
def command(source: ModelSource, text: Path, ctx: int, special_tokens: str) -> None:
    """Perplexity of a text, as llama.cpp's tool of this name computes it.

    Of JSON Lines, JSON and CSV, every row is a document, read and scored as finetune's validation
    does.
    """
    check_text([text])
    opened = source.load()
    windows = _windows(opened, source, text, ctx, special_tokens)
    time, parse = Countdown(), special_tokens == "parse"
    for so_far in _name_file(text, perplexity(opened, windows, ctx, parse)):
        if so_far.chunk == 1:
            about = f"{plural(so_far.n_chunks, 'chunk')} of {ctx} tokens"
            say_progress(about)
        time.say_left(so_far.chunk, so_far.n_chunks)
        with progress_lines():
            say(f"[{so_far.chunk}]{so_far.value:.4f},", end="")
    with progress_lines():
        say()
    say(f"Final estimate: PPL = {so_far.value:.4f} +/- {so_far.error:.5f}")


def _windows(
    model: Model, source: ModelSource, path: Path, ctx: int, special_tokens: str
) -> str | Dataset:
    """A text as it is, or windows of rows; chats are written as an adapter was trained."""
    kind, rows = read_rows(path)
    if kind == "text":
        (row,) = rows
        assert isinstance(row, TextRow)
        return row.text.removesuffix("\n")  # llama.cpp's -f drops one
    encoding = Encoding(special_tokens)
    if any(isinstance(row, ChatRow) for row in rows):
        choice = choose_template(model.tokenizer, (path for path, _ in source.adapters), None)
        for line in choice.notes:
            note(line)
        config = DataConfig(chat_template=choice.wanted, special_tokens=special_tokens)
        encoding = Encoding.of(config, model.tokenizer)
    windows = pack(encode_rows(rows, model.tokenizer, encoding), ctx)
    if not len(windows):
        raise DataError(f"{path}: holds one token a document, wanted at least two to predict one")
    return windows


def _name_file(path: Path, results: Iterator[Perplexity]) -> Iterator[Perplexity]:
    """The same, and errors that are the text's name its file."""
    try:
        yield from results
    except DataError as error:
        raise DataError(f"{path}: {error}; a smaller --ctx needs less") from None
