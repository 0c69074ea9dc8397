"""`pyggml perplexity`: text → the running perplexity, then its final estimate and error."""

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from pyggml import Model
from pyggml.cli.terminal.data_files import data_option
from pyggml.cli.terminal.help import grouped_command
from pyggml.cli.terminal.options import ModelSource, given_settings, model_options
from pyggml.cli.terminal.progress import Countdown
from pyggml.cli.terminal.show import note, plural, progress_lines, say, say_progress
from pyggml.cli.terminal.texts import read_texts, text_options
from pyggml.errors import DataError, NotFiniteError
from pyggml.lora import Perplexity, perplexity
from pyggml.lora.config import DataConfig, EvalConfig
from pyggml.lora.data import Dataset, Row
from pyggml.lora.evaluate.rows import windows


@grouped_command(
    "perplexity",
    "pyggml perplexity -m model.gguf -f wiki.test.raw",
    "pyggml perplexity -m model.gguf --lora adapter.gguf -f text.txt --ctx 2048",
    "pyggml perplexity -m model.gguf -f chats.jsonl",
    params=text_options(),
)
@model_options
@data_option("UTF-8 text, or rows as for finetune")
def command(source: ModelSource, files: tuple[Path, ...], **given: Any) -> None:
    """Perplexity of a text, as llama.cpp's tool of this name computes it.

    Of JSON Lines, JSON, CSV and parquet, every row is a document, read and scored as finetune's
    validation does. Each file has its own estimate.
    """
    config = EvalConfig(**given_settings(EvalConfig, {}, given))
    opened = source.load()
    ctx = config.rows(opened.config.n_ctx).ctx
    read = [*read_texts(opened, source, files, config, _windows)]
    for path, text in read:
        if len(read) > 1:
            say(f"{path}:")
        _estimate(opened, path, text, ctx, config.special_tokens == "parse")


def _windows(rows: Sequence[Row], model: Model, config: DataConfig) -> Dataset:
    """As `eval` has them; what is left out is said."""
    data, n_long = windows(rows, model.tokenizer, config)
    if n_long:
        note(f"{rows[0].place.file}: {plural(n_long, 'row')} longer than --ctx left out")
    return data


def _estimate(model: Model, path: Path, text: str | Dataset, ctx: int, parse: bool) -> None:
    """Print the running perplexity of a file, and its final estimate."""
    time = Countdown()
    for so_far in _name_file(path, perplexity(model, text, ctx, parse)):
        if so_far.chunk == 1:
            say_progress(f"{plural(so_far.n_chunks, 'chunk')} of {ctx} tokens")
        time.say_left(so_far.chunk, so_far.n_chunks)
        with progress_lines():
            say(f"[{so_far.chunk}]{so_far.value:.4f},", end="")
    with progress_lines():
        say()
    if not isfinite(so_far.value + so_far.error):
        mean = float(so_far.scores.losses.mean())
        said = f"the mean loss of its last chunk is {mean:.4g}, too high for a perplexity"
        raise NotFiniteError(f"{path}: {said}")
    say(f"Final estimate: PPL = {so_far.value:.4f} +/- {so_far.error:.5f}")


def _name_file(path: Path, results: Iterator[Perplexity]) -> Iterator[Perplexity]:
    """The same, and errors that are the text's name its file."""
    try:
        yield from results
    except NotFiniteError as error:
        say()  # the line of what was so far
        raise NotFiniteError(f"{path}: {error}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}; a smaller --ctx needs less") from None
