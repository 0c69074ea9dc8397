"""Files → windows of which all that is to be learned is learned; of rows, whole ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from pyggml.errors import DataError
from pyggml.lora.data.pipeline import CorpusReader
from pyggml.lora.data.reading.files import UNITS
from pyggml.lora.data.reading.sources import FileSummary, Source
from pyggml.lora.data.records.rows import RowPlace
from pyggml.lora.data.tokens.chats import CHAT, OPEN
from pyggml.lora.data.tokens.documents import Documents, Notes
from pyggml.lora.data.tokens.reader import FileContent
from pyggml.lora.data.windows.batches import Dataset, FileWindows
from pyggml.lora.data.windows.lengths import bucket, check_lengths
from pyggml.lora.data.windows.packing import held_out, join, pack


class TextReader(CorpusReader):
    """Reads files into windows of which all that is to be learned is learned."""

    def windows(self, path: Path, content: FileContent, share: float) -> FileWindows:
        documents, kind, n_truncated = content.kept.documents, content.kept.kind, 0
        if documents.trained is not None:
            _check_ends(path, content.kept.notes)
            if self.config.long_chats == "refuse":
                check_lengths(documents.lengths, self.ctx, partial(_place, path, kind, documents))
            documents, n_truncated = self.fit(documents)
        if kind == "text":
            windows = pack(documents, self.ctx, folder=self.folder)
            train, validation, n_held_out = *_split_windows(windows, share), 0
        else:
            out = np.zeros(len(documents), np.bool_)
            out[held_out(documents.lengths.tolist(), share, self.config.val_shuffle)] = True
            n_held_out = int(out.sum())
            train, validation = (
                self._pack_rows(documents.part(np.flatnonzero(which))) for which in (~out, out)
            )
        n_dropped = len(content.kept.documents) - len(documents)
        summary = FileSummary(Source(path), kind, len(documents), n_held_out, documents.n_tokens)
        summary = replace(summary, n_dropped=n_dropped, n_truncated=n_truncated)
        return FileWindows(train, validation, summary)

    def fit(self, documents: Documents) -> tuple[Documents, int]:
        """The documents that fit into a window, and how many of them only in part."""
        return fit_documents(documents, self.ctx, self.config.long_chats)

    def join(self, datasets: Sequence[Dataset]) -> Dataset:
        parts = [dataset for dataset in datasets if len(dataset)]
        return join(parts, self.folder) if parts else pack([], self.ctx)

    def arranged(
        self, train: Dataset, validation: Dataset, parts: Sequence[FileWindows]
    ) -> tuple[Dataset, Dataset]:
        _check_amount(train, parts, self.ctx)
        if not self.config.packing:
            train, validation = bucket([train, validation])
        return train, validation

    def _pack_rows(self, documents: Documents) -> Dataset:
        """Windows of rows, each whole in one if it is no longer."""
        alone = not self.config.packing
        return pack(documents.pieces(self.ctx), self.ctx, True, self.folder, alone)


def _check_amount(train: Dataset, parts: Sequence[FileWindows], ctx: int) -> None:
    """There is a window at least, and one that is full where all is plain text."""
    n_tokens = sum(part.summary.n_tokens for part in parts)
    is_text = all(part.summary.kind == "text" for part in parts)
    if not len(train) or (n_tokens < ctx + 1 and is_text):
        names = ", ".join(str(part.summary.source.path) for part in parts)
        n_dropped = sum(part.summary.n_dropped for part in parts)
        if n_dropped and not n_tokens:
            raise DataError(
                f"{names}: every row ({n_dropped}) is longer than a window of {ctx}: give a larger "
                "--ctx"
            )
        raise DataError(
            f"{names}: holds {n_tokens} tokens, wanted at least {ctx + 1} for one window of {ctx} "
            "and the token after it: give more text or a smaller --ctx"
        )


def _split_windows(windows: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """All but the last windows, and these: a share of all, at least one if there are two."""
    cut = len(windows)
    if share and cut > 1:
        cut -= min(max(round(share * cut), 1), cut - 1)
    return windows.part(slice(cut)), windows.part(slice(cut, None))


def _check_ends(path: Path, notes: Notes) -> None:
    """DataError if no answer of any chat has an end that is learned."""
    n_chats, n_open = (notes.get(note, (0, ""))[0] for note in (CHAT, OPEN))
    if n_chats and n_chats == n_open:
        raise DataError(
            f"{path}: no answer ends in a token that ends a turn, so the model would not learn to "
            "stop: --chat-template names a template whose ends this vocabulary has; alpaca takes "
            "the end of text"
        )


def _place(path: Path, kind: str, documents: Documents, i: int) -> RowPlace:
    assert documents.places is not None
    return RowPlace(str(path), UNITS[kind], *documents.places[i].tolist())


def fit_documents(documents: Documents, ctx: int, long: str) -> tuple[Documents, int]:
    """The documents that fit into a window, and how many of them only in part.

    long: "truncate" takes the first tokens of longer ones, unless none of these is learned; all
    else leaves longer ones out
    """
    fits = documents.lengths <= ctx + 1
    if long != "truncate":
        return documents.part(np.flatnonzero(fits)), 0
    kept = np.flatnonzero(fits)
    first = documents.part(np.flatnonzero(~fits))
    first = first.shorten(np.minimum(first.lengths, ctx + 1))
    cut = np.flatnonzero(~fits)[first.are_learned()]
    both = np.sort(np.concatenate([kept, cut]))
    fitting = documents.part(both)
    return fitting.shorten(np.minimum(fitting.lengths, ctx + 1)), len(cut)
