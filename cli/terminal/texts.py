"""What perplexity and imatrix read: texts as llama.cpp reads them, and the windows of rows."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyggml import Model
from pyggml.chat import MODEL
from pyggml.cli.terminal.chat_templates import choose_template
from pyggml.cli.terminal.data_files import data_files
from pyggml.cli.terminal.help import GroupedOption
from pyggml.cli.terminal.options import ModelSource, settings_options
from pyggml.errors import DataError
from pyggml.lora.config import DataConfig, EvalConfig
from pyggml.lora.data import Dataset, Row, TextRow, read_rows
from pyggml.lora.data.records import schema_of
from pyggml.lora.data.records.rows import ChatRow

Windows = Callable[[Sequence[Row], Model, DataConfig], Dataset]


def text_options(*without: str) -> list[GroupedOption]:
    """Options for how texts and rows are read, as `eval` has them."""
    return settings_options(EvalConfig, {}, ["limit", "delimiter", *without])


def read_texts(
    model: Model, source: ModelSource, data: Sequence[Path], config: EvalConfig, windows: Windows
) -> Iterator[tuple[Path, str | Dataset]]:
    """Each file: a text, or what `windows` makes of its rows. Chats are written as an adapter was
    trained, unless the settings name a template.

    Raises DataError as `read_rows` and `windows` do.
    """
    schema, template = schema_of(config.columns), None
    for path in data_files(data, config.columns):
        kind, rows = read_rows(path, schema)
        if kind == "text":
            (row,) = rows
            assert isinstance(row, TextRow)
            yield path, row.text.removesuffix("\n")  # llama.cpp's -f drops one
            continue
        if template is None and any(isinstance(row, ChatRow) for row in rows):
            template = _template(model, source, config)
        try:
            yield path, windows(rows, model, config.rows(model.config.n_ctx, template or MODEL))
        except DataError as error:
            about = "" if str(path) in str(error) else f"{path}: "
            raise DataError(f"{about}{error}") from None


def _template(model: Model, source: ModelSource, config: EvalConfig) -> str:
    choice = choose_template(model.tokenizer, source.adapters, config.chat_template)
    choice.say_notes()
    return choice.template
