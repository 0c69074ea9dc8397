"""A file → its documents, those that an earlier run kept or read anew."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError
from pyggml.lora.config import DataConfig
from pyggml.lora.data.formats.packed import suffix_of
from pyggml.lora.data.formats.source import blocks
from pyggml.lora.data.reading.files import RowFaults, check_rows, format_of, records, rows_of
from pyggml.lora.data.reading.program import records_of_program
from pyggml.lora.data.reading.sources import FileSummary, Source
from pyggml.lora.data.records import schema_of
from pyggml.lora.data.records.rows import Row, RowPlace
from pyggml.lora.data.tokens.cache import VERSION, CachedDocuments, TokenCache
from pyggml.lora.data.tokens.chats import CHAT
from pyggml.lora.data.tokens.documents import Document, Writer
from pyggml.lora.data.tokens.encode import Encoding, encode
from pyggml.lora.data.tokens.long_text import token_parts
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file's content, and remarks on its reading. See `FileSummary`."""

    kept: CachedDocuments
    was_kept: bool = False
    not_kept: str = ""


class RowReader:
    """Reads files by the same settings. purpose: of `Schema`.

    text_lacks   why plain text is none of its files; "" where it is
    """

    text_lacks = ""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: DataConfig,
        cache: TokenCache | None,
        purpose: str = "training",
    ) -> None:
        if not hasattr(tokenizer, "encode"):
            raise DataError(f"{tokenizer!r:.60} is no tokenizer, wanted one, as model.tokenizer")
        self.tokenizer, self.cache = tokenizer, cache
        self.config, self.ctx = config, config.ctx
        self.encoding = Encoding.of(config, tokenizer)
        self.schema = schema_of(config.columns, purpose)
        self.skip_bad_rows = config.skip_bad_rows

    def encode_row(self, row: Row) -> Sequence[Document]:
        """The documents of a row. Raises BadValue for one that has none."""
        return [encode(row, self.tokenizer, self.encoding)]

    def about(self, files: Iterable[FileSummary]) -> dict[str, Any]:
        """The settings that make the windows of these files, which a resumed run must share, with
        the digest of what their chats are written by."""
        about, chats = dict(self.config.shared_by_runs()), self.encoding.chats
        if chats is not None and any(CHAT in file.notes for file in files):
            text = repr((chats.source, chats.with_tools, chats.names))
            about["template"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return about

    @property
    def folder(self) -> Path | None:
        """Where large arrays lie; None is the system's choice."""
        return None if self.cache is None else self.cache.folder_made()

    def documents(self, source: Source) -> FileContent:
        """Those of a file, from the cache if they are there, else kept in it; or of a program's
        rows."""
        path = source.path
        if source.rows is not None:
            return FileContent(self._encode(path, "rows", records_of_program(source.rows, path)))
        if self.cache is None:
            return FileContent(self.read(path))
        key = self.key(path, self.cache.content(path))
        kept = self.cache.find(key, self.tokenizer.n_vocab)
        if kept is not None:
            if not self.skip_bad_rows:
                check_rows(path, self.schema, len(kept.documents), kept.faults)
            return FileContent(kept, was_kept=True)
        content = FileContent(self.read(path))
        if self.cache.content(path) != key["content"]:
            return replace(content, not_kept="the file changed while it was read")
        fault = self.cache.keep(key, content.kept)
        mapped = self.cache.find(key, self.tokenizer.n_vocab)
        return FileContent(mapped or content.kept, not_kept=fault)

    def key(self, path: Path, content: str) -> dict[str, Any]:
        """What the tokens of a file depend on."""
        return {
            "version": VERSION,
            "content": content,
            "ending": suffix_of(path),
            "schema": asdict(self.schema),
            "encoding": asdict(self.encoding),
            "tokenizer": self.tokenizer.identity,
            "libraries": [version(name) for name in ("tokenizers", "sentencepiece")],
        }

    def read(self, path: Path) -> CachedDocuments:
        """The documents of a file. DataError for faulty rows, if they may not be skipped."""
        kind = format_of(path, self.schema)
        if kind != "text":
            return self._encode(path, kind, records(path, kind, self.schema))
        if self.text_lacks:
            why = f"is plain text, which {self.text_lacks}"
            raise DataError(f"{path}: {why}; {self.schema.names_sought}")
        writer, parse = Writer(self.folder), self.encoding.parses(plain=True)
        writer.add_parts(token_parts(blocks(path), self.tokenizer, parse))
        return CachedDocuments(writer.documents(), kind, RowFaults())

    def _encode(
        self, path: Path, kind: str, placed: Iterable[tuple[RowPlace, Any]]
    ) -> CachedDocuments:
        """The documents of records. DataError as of `read`."""
        writer, faults, notes = Writer(self.folder), RowFaults(), dict[str, tuple[int, str]]()
        for row in rows_of(placed, self.schema, faults, notes):
            if self.skip_bad_rows or not faults.total:  # else the others are but counted
                try:
                    of_row = self.encode_row(row)
                except BadValue as bad:
                    faults.add(row.place, bad, is_row=True)
                    continue
                for document in of_row:
                    writer.add(document, row.place)
                for note in dict.fromkeys(n for document in of_row for n in document.notes):
                    n, first = notes.get(note, (0, str(row.place)))
                    notes[note] = (n + 1, first)
        documents = writer.documents()
        check_rows(path, self.schema, len(documents), RowFaults() if self.skip_bad_rows else faults)
        return CachedDocuments(documents, kind, faults, notes)
