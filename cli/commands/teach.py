"""`pyggml teach`: a model reads a text once; what it says of each token is kept for students."""

from pathlib import Path
from typing import Any

import click

from pyggml.cli.terminal.exit import STOPPED
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import data_files
from pyggml.cli.terminal.interrupt import stop_on_signals
from pyggml.cli.terminal.kinds import TEACHER
from pyggml.cli.terminal.options import (
    ModelSource,
    compute_options,
    given_settings,
    model_option,
    output_option,
    settings_options,
)
from pyggml.cli.terminal.paths import check_space
from pyggml.cli.terminal.places import FileWord
from pyggml.cli.terminal.progress import Countdown
from pyggml.cli.terminal.show import plural, row, say, size, with_size
from pyggml.errors import ConfigError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import Source
from pyggml.lora.teacher import Teaching
from pyggml.lora.trainer import lock

_NOTE = b"\nstopping after this window; the same command goes on from there\n"


@grouped_command(
    "teach",
    "pyggml teach -m teacher.gguf -f chats.jsonl -o answers.gguf",
    "pyggml finetune -m m.gguf -f text -o a.gguf --objective distill --teacher t.gguf",
    "pyggml teach -m teacher.gguf -f text.txt -o answers.gguf --top-k 16 --ctx 512",
    params=settings_options(DataConfig, {}, ["cache_dir"]),
)
@model_option
@grouped_option(
    "data",
    "-f --file data",
    "text or rows, as finetune takes them; may be given several times",
    type=FileWord(),
    multiple=True,
    required=True,
    metavar="FILE",
)
@output_option(TEACHER, "GGUF file to write")
@grouped_option(
    "output",
    "--top-k",
    "likeliest tokens whose probabilities are kept; all others count as one",
    type=click.IntRange(1, 1 << 16),
    default=64,
)
@grouped_option(
    "output",
    "--temperature",
    "what divides the logits; finetune's --teacher-temperature must be the same",
    type=click.FloatRange(0.1, 100),
    default=1.0,
)
@compute_options
def command(
    data: tuple[str, ...], output: Path, top_k: int, temperature: float, **given: Any
) -> None:
    """Keep a teacher's probabilities of every token that a student is to learn.

    The settings of data must be those of the student's run. Ctrl-C stops; the same command goes on.
    """
    source = ModelSource.taken_from(given)
    config = DataConfig(**given_settings(DataConfig, {}, given))
    opened = source.load()
    if config.ctx > opened.config.n_ctx:
        fault = f"is {config.ctx}, wanted at most the model's {opened.config.n_ctx}"
        raise ConfigError([("ctx", fault)])
    files = [f for one in data for f in data_files(Source.of(one).path)]
    with lock.hold(output):
        corpus = read_corpus(files, opened.tokenizer, config)
        teaching = Teaching(opened, corpus, output, top_k, temperature)
        n = len(teaching.plan.windows)
        tokens = f"{plural(teaching.plan.n, 'token')} to learn in {plural(n, 'window')}"
        row("data", f"{tokens} of {corpus.train.ctx}")
        row("output", f"{output}: {size(teaching.n_bytes)}, {teaching.k} probabilities of a token")
        if not teaching.unfinished.exists():
            check_space(output, teaching.n_bytes)
        if not _run(teaching, n):
            click.get_current_context().exit(STOPPED)


def _run(teaching: Teaching, n: int) -> bool:
    """Whether it came to its end."""
    stopped, time, first = list[bool](), Countdown(), teaching.open()
    if first:
        row("resumed", f"{first:,} of {plural(n, 'window')} are done")
    done = first
    with stop_on_signals(lambda: stopped.append(True), _NOTE):
        for done in teaching.run():
            time.say_left(done - first, n - first)
            if stopped:
                break
    if done < n:
        say(f"{done:,} of {plural(n, 'window')} are done: {teaching.unfinished}")
        return False
    teaching.finish()
    say(with_size(teaching.path))
    return True
