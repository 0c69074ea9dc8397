"""What a teacher said of a text, as a GGUF file: read window by window, where it is mapped.

teacher.documents   (m, 2) I64   the digest of each document, ascending, and its first position
teacher.ids         (n, k) I32   as `Distributions` has them, of all learned positions
teacher.log_probs   (n, k + 1) F16
teacher.progress    (1,) I64     windows that are done: all of a finished file

A document is known by its tokens and by which of them are learned. So the file serves whatever the
packing, the order and the share that is held out; another text, template or cut has no answers.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from pyggml.errors import ConfigError, DataError, GGUFError
from pyggml.gguf import GGUFFile
from pyggml.graph import Graph
from pyggml.lora.data import Corpus, Dataset
from pyggml.lora.data.windows.units import Units
from pyggml.lora.teacher.distributions import Distributions
from pyggml.model import Model
from pyggml.runtime import Program
from pyggml.tokenizer.same_tokens import vocabulary_digest

TYPE = "teacher"  # of general.type
_MOST = 1e-3  # of a logarithm of a probability, which is 0 but for rounding
TEMPLATE = "template"  # of a corpus's settings: the digest of what its chats were written by


def document_keys(data: Dataset) -> Iterator[tuple[int, int]]:
    """(digest, number of learned tokens) of each document with any in some windows, in order."""
    units = Units.of(data)
    for i in range(len(units)):
        ids, learned = units.tokens(data, i)
        digest = hashlib.blake2b(np.ascontiguousarray(ids, "<i4").tobytes(), digest_size=8)
        digest.update(np.packbits(learned).tobytes())
        yield int.from_bytes(digest.digest(), "little", signed=True), int(learned.sum())


class TeacherFile:
    """Distributions that a teacher made beforehand. Raises DataError for a file that has none."""

    graphs: Sequence[Graph] = ()

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        if file.word("general.type") != TYPE:
            raise DataError(f"{self.path}: is nothing that `pyggml teach` wrote")
        names = ("documents", "ids", "log_probs", "progress")
        try:
            self.k, self._n_vocab, n_windows = (
                file.require(f"teacher.{key}", int) for key in ("k", "n_vocab", "windows")
            )
            self._temperature = file.require("teacher.temperature", float)
            self._vocabulary, self._template = (
                file.require(f"teacher.{key}", str) for key in ("vocabulary", "template")
            )
            self._documents, self._ids, self._log_probs, progress = (
                file.data(f"teacher.{name}") for name in names
            )
        except GGUFError as error:
            raise DataError(str(error)) from None
        n, m = len(self._ids), len(self._documents)
        shapes = [(m, 2), (n, self.k), (n, self.k + 1), (1,)]
        kinds = [np.int64, np.int32, np.float16, np.int64]
        arrays = self._documents, self._ids, self._log_probs, progress
        fits = [a.shape for a in arrays] == shapes and [a.dtype for a in arrays] == kinds
        if self.k < 1 or not fits:
            raise DataError(f"{self.path}: its tensors do not fit each other, wanted `teach`'s")
        self._keys = np.ascontiguousarray(self._documents[:, 0])
        if not (self._keys[1:] > self._keys[:-1]).all():
            raise DataError(f"{self.path}: its documents are not in order, wanted `teach`'s")
        if progress[0] != n_windows:
            raise DataError(f"{self.path}: is not finished, wanted all that `pyggml teach` writes")

    def check(self, student: Model, corpus: Corpus, temperature: float) -> None:
        """Raises ConfigError or DataError, in a sentence, if it was made for another vocabulary, by
        another template, of another text or at another temperature."""
        is_same = self._vocabulary == vocabulary_digest(student.file)
        if not is_same or not self.k <= self._n_vocab <= student.config.n_vocab:
            raise DataError(
                f"{self.path}: was made for another vocabulary than {student.file.path} has, "
                "wanted the same tokens"
            )
        if not abs(self._temperature - temperature) <= 1e-6 * temperature:
            origin = f"was made at {self._temperature:g}"
            fault = f"is {temperature:g}, but {self.path} {origin}, wanted the same"
            raise ConfigError([("teacher_temperature", fault)])
        each = [pair for part in corpus.parts for pair in document_keys(part)]
        n_lacking = sum(self._first(*pair) is None for pair in each)
        if not n_lacking:
            return
        lacks = f"{self.path}: has no answers to {n_lacking:,} of {len(each):,} documents"
        if self._template != str(corpus.about.get(TEMPLATE, "")):
            raise DataError(f"{lacks}: its chats were written by another template")
        raise DataError(f"{lacks}: it was made of another text, or with another --ctx")

    def distributions(
        self, programs: Sequence[Program], data: Dataset, window: int
    ) -> Distributions:
        """As `Teacher` has it. Raises DataError for numbers that no teacher says."""
        part = data.part(np.array([window]))
        at = np.concatenate([np.zeros(0, np.int64), *map(self._rows, document_keys(part))])
        ids, log_probs = self._ids[at], self._log_probs[at].astype(np.float32)
        targets = part.tokens[:, 1:][part.targets()]
        in_order = np.sort(ids, axis=1)
        fits = bool((ids[:, 0] == targets).all() and (np.diff(in_order, axis=1) > 0).all())
        fits &= bool((in_order[:, :1] >= 0).all() and (in_order[:, -1:] < self._n_vocab).all())
        fits &= bool((log_probs < _MOST).all())
        with np.errstate(over="ignore"):
            sums = np.exp(log_probs.astype(np.float64)).sum(axis=1)
        if not fits or not (np.abs(sums - 1) < 0.1).all():
            raise DataError(f"{self.path}: holds numbers that are no teacher's probabilities")
        return Distributions(ids, log_probs)

    def _rows(self, document: tuple[int, int]) -> np.ndarray:
        """The positions of a document, by its digest and its number of learned tokens."""
        first, n = self._first(*document), document[1]
        if first is None:
            raise DataError(f"{self.path}: has no answers to a document of this run")
        return np.arange(first, first + n)

    def _first(self, key: int, n: int) -> int | None:
        """The first of the n positions of a document, if they are there."""
        i = int(np.searchsorted(self._keys, key))
        if i == len(self._keys) or self._keys[i] != key:
            return None
        first = int(self._documents[i, 1])
        return first if 0 <= first <= len(self._ids) - n else None
