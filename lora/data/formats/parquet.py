"""Parquet → records, by pyarrow, which is imported when a file needs it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyggml.errors import DataError
from pyggml.extras import how_to_install
from pyggml.lora.data.formats.format import FileFormat, FileStart, of_table
from pyggml.lora.data.formats.packed import PARQUET_MAGIC, SUFFIXES
from pyggml.lora.data.records import Schema
from pyggml.lora.data.records.rows import RowPlace

_BATCH = 64  # rows in memory at a time


def _is_parquet(file: FileStart, schema: Schema) -> bool:
    """Raises DataError for a file that is compressed once more."""
    is_this = file.start.startswith(PARQUET_MAGIC)
    if is_this and file.path.suffix.lower() in SUFFIXES:
        raise DataError(f"{file.path}: is compressed parquet, which packs by itself: unpack it")
    return is_this


def parquet_rows(path: Path, may_read: Callable[[str], bool]) -> Iterator[tuple[RowPlace, Any]]:
    """A dict for each row. It has the columns that may be read, by their names; others are None. A
    file with none of these columns gives all that it has.

    Of a nested column, a null is left out: there every object has the names of all. Raises
    DataError without pyarrow, and for a damaged file.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: is parquet, which needs pyarrow: {how_to_install('parquet')}"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if may_read(name)]
            unread = dict.fromkeys(n for n in names if columns and n not in columns)
            for batch in file.iter_batches(_BATCH, columns=columns or None):
                for record in batch.to_pylist():
                    number += 1
                    values = {name: _present(value) for name, value in record.items()}
                    yield RowPlace(str(path), "row", number), values | unread
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise DataError(f"{path}: cannot be read after row {number}: {reason}") from None


def _present(value: Any) -> Any:
    """Without the names whose value is null."""
    if isinstance(value, dict):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


PARQUET = FileFormat(
    "parquet", "row", _is_parquet,
    lambda path, schema: of_table(path, parquet_rows(path, schema.may_read), schema, "has the"),
)  # fmt: skip
