"""`pyggml imatrix`: a model and texts → the importance of its matrices' columns."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pyggml import Model
from pyggml.cli.terminal.data_files import data_option
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import IMPORTANCE
from pyggml.cli.terminal.options import ModelSource, given_settings, model_options, output_option
from pyggml.cli.terminal.progress import Countdown
from pyggml.cli.terminal.show import plural, say, say_progress, with_size
from pyggml.cli.terminal.texts import read_texts, text_options
from pyggml.errors import DataError
from pyggml.files import in_characters
from pyggml.lora.config import DataConfig, EvalConfig
from pyggml.lora.data import Dataset, Encoding, Row, encode_rows, pack
from pyggml.lora.evaluate.importance import Collector


@grouped_command(
    "imatrix",
    "pyggml imatrix -m model-F16.gguf -f calibration.txt -o imatrix.gguf",
    "pyggml imatrix -m model-F16.gguf -f calibration.txt -o imatrix.gguf --chunks 100",
    "pyggml quantize model-F16.gguf model-Q4_K_M.gguf Q4_K_M --imatrix imatrix.gguf",
    params=text_options("long"),
)
@model_options
@data_option("calibration data: UTF-8 text, or rows as for finetune")
@output_option(IMPORTANCE, "GGUF file to write")
@grouped_option(
    "data", "--chunks", "most chunks to read (default: all)", type=click.IntRange(min=1)
)
def command(
    source: ModelSource, files: tuple[Path, ...], output: Path, chunks: int | None, **given: Any
) -> None:
    """Compute an importance matrix from calibration data, for quantize --imatrix.

    The file is llama.cpp's. Of rows every token counts, in windows that they fill.
    """
    config = EvalConfig(**given_settings(EvalConfig, {}, given))
    opened = source.load()
    ctx = config.rows(opened.config.n_ctx).ctx
    read = dict(read_texts(opened, source, files, config, _windows))
    times = Counter(path.name for path in read)
    names = {path: path.name if times[path.name] == 1 else path for path in read}
    texts = {in_characters(names[path]): text for path, text in read.items()}
    try:
        collector = Collector(opened, texts, ctx, chunks, config.special_tokens == "parse")
    except DataError as error:
        about = ", ".join(map(str, read))
        raise DataError(f"{about}: {error}; a smaller --ctx needs less") from None
    n_left = collector.n_left_out
    rest = f"; {plural(n_left, 'token')} that fill none left out" if n_left and not chunks else ""
    say_progress(f"{plural(collector.n_chunks, 'chunk')} of {ctx} tokens{rest}")
    time = Countdown()
    for n in collector.run():
        time.say_left(n, collector.n_chunks)
    matrix = collector.result(n)
    matrix.save(output)
    n_rare = sum(bool((s.counts == 0).any()) for s in matrix.sums.values())
    rare = f", {n_rare} with experts that no token asked" if n_rare else ""
    say(f"{plural(len(matrix.sums), 'matrix', 'matrices')}{rare}")
    say(with_size(output))


def _windows(rows: Sequence[Row], model: Model, config: DataConfig) -> Dataset:
    encoding = Encoding.of(config, model.tokenizer)
    return pack(encode_rows(rows, model.tokenizer, encoding), config.ctx)
