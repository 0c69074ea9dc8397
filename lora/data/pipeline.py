"""Files → the windows of each → a corpus: the same for texts and for preferences."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.lora.data.reading.expand import expand
from pyggml.lora.data.reading.sources import File, Source
from pyggml.lora.data.tokens.reader import FileContent, RowReader
from pyggml.lora.data.unused import unused_by_answers
from pyggml.lora.data.windows.batches import Corpus, Dataset, FileWindows


class CorpusReader(RowReader):
    """Reads files into windows, by the same settings.

    compares   whether its objective compares answers
    """

    compares = False

    @abstractmethod
    def windows(self, path: Path, content: FileContent, share: float) -> FileWindows:
        """Those of a file's documents, a share of them held out."""

    @abstractmethod
    def join(self, datasets: Sequence[Dataset]) -> Dataset:
        """The windows of all files, one file's after another's; there may be none."""

    def arranged(
        self, train: Dataset, validation: Dataset, parts: Sequence[FileWindows]
    ) -> tuple[Dataset, Dataset]:
        """Both as batches want them. Raises DataError for too few; parts: those trained on."""
        return train, validation

    def corpus(self, given: Sequence[File], held_out: Sequence[File]) -> Corpus:
        """Raises DataError with what is wrong with any of the files, and ConfigError for settings
        that would do nothing."""
        about = f"an objective of {self.schema.purpose}"
        if self.compares and (faults := unused_by_answers(self.config, about)):
            raise ConfigError(faults)
        aside = [*(Source(Path(f)) for f in self.config.val_file or ()), *map(Source.of, held_out)]
        not_trained, left_out = expand(aside, self.schema)
        sources, unread = expand([Source.of(file) for file in given], self.schema)
        apart = self._all(not_trained, 0.0)
        trained = self._all(sources, 0.0 if apart else self.config.val_split)
        train = self.join([part.train for part in trained])
        validation = self.join([p.validation for p in trained] + [p.train for p in apart])
        train, validation = self.arranged(train, validation, trained)
        files = [part.summary for part in trained]
        files += [replace(p.summary, n_held_out=p.summary.n_documents) for p in apart]
        held_out_windows = validation if len(validation) else None
        left_out = (*unread, *left_out)
        return Corpus(train, held_out_windows, tuple(files), left_out, self.about(files))

    def _all(self, sources: Iterable[Source], share: float) -> list[FileWindows]:
        parts, faults = [], list[str]()
        for source in sources:
            try:
                parts.append(self._part(source, share))
            except DataError as error:
                faults.append(str(error))
        if faults:
            raise DataError(faults)
        return parts

    def _part(self, source: Source, share: float) -> FileWindows:
        """The windows of one file, those to train on as often as its weight says."""
        content = self.documents(source)
        kept, part = content.kept, self.windows(source.path, content, share)
        summary = replace(
            part.summary,
            source=replace(source, rows=None),
            skipped=kept.faults,
            was_kept=content.was_kept,
            not_kept=content.not_kept,
            notes=kept.notes,
        )
        train = part.train
        if source.weight != 1:
            train = replace(train, repeats=np.full(len(train), source.weight))
        return FileWindows(train, part.validation, summary)
