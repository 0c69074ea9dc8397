"""A teacher reads a text once: what it says is kept in a file, which may be gone on with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import GGUFError, PyggmlError
from pyggml.gguf.identity import identity
from pyggml.graph.dtypes import F16, I32, I64, DType
from pyggml.lora.data import Corpus, Dataset
from pyggml.lora.teacher.file import TEMPLATE, TYPE, document_keys
from pyggml.lora.teacher.model import TeacherModel
from pyggml.model import Model
from pyggml.runtime import Arenas, Program, bind, schedule
from pyggml.tokenizer.same_tokens import used_tokens, vocabulary_digest

_EACH = 64  # windows between two points from which an ended run goes on
_INSTEAD = "remove it, or name another output"
_WORDS = {  # of what an unfinished file was begun with
    "teacher.model": "teacher",
    "teacher.template": "chat template",
    "teacher.text": "text",
    "teacher.k": "--top-k",
    "teacher.temperature": "--temperature",
}
_Tensor = tuple[str, DType, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TeachPlan:
    """What a teacher will read, and what it will write.

    documents   (m, 2) int64: the digest of each different document, ascending, and its position
    windows     the windows that hold them, each once: (part of the corpus, number)
    n           learned positions
    """

    documents: np.ndarray
    windows: tuple[tuple[int, int], ...]
    n: int

    @classmethod
    def of(cls, corpus: Corpus) -> TeachPlan:
        first: dict[int, int] = {}
        windows, n = list[tuple[int, int]](), 0
        for p, part in enumerate(corpus.parts):
            for w in range(len(part)):
                before = n
                for key, count in document_keys(part.part(np.array([w]))):
                    if key not in first:
                        first[key] = n
                        n += count
                if n > before:
                    windows.append((p, w))
        documents = np.array(sorted(first.items()), np.int64).reshape(-1, 2)
        return cls(documents, tuple(windows), n)

    def tensors(self, k: int) -> list[_Tensor]:
        return [
            ("teacher.documents", I64, self.documents.shape),
            ("teacher.progress", I64, (1,)),
            ("teacher.ids", I32, (self.n, k)),
            ("teacher.log_probs", F16, (self.n, k + 1)),
        ]

    def n_bytes(self, k: int) -> int:
        """Of the file's tensors."""
        return sum(prod(shape) * dtype.block_bytes for _, dtype, shape in self.tensors(k))


class Teaching:
    """A file under way: `run` reads windows that are not done, `finish` puts the file in place.

    It lies beside its place, with .unfinished after its name, until it is whole. Raises PyggmlError
    if what lies there is of another teacher, text or setting.
    """

    def __init__(
        self, model: Model, corpus: Corpus, path: Path, k: int = 64, temperature: float = 1.0
    ) -> None:
        self._model, self._parts, self.path = model, corpus.parts, path
        n_vocab = len(used_tokens(model.file)) or model.config.n_vocab
        self._how = n_vocab, k, temperature
        self.k = min(k, n_vocab)
        self.plan = TeachPlan.of(corpus)
        self.unfinished = path.with_name(f"{path.name}.unfinished")
        self._lengths = corpus.lengths
        self._metadata: dict[str, Any] = {
            "general.type": TYPE,
            "general.name": str(model.file.get("general.name", model.file.path.name)),
            "teacher.model": str(identity(model.file)),
            "teacher.vocabulary": vocabulary_digest(model.file),
            "teacher.template": str(corpus.about.get(TEMPLATE, "")),
            "teacher.text": corpus.digest(),
            "teacher.n_vocab": n_vocab,
            "teacher.k": self.k,
            "teacher.temperature": float(temperature),
            "teacher.windows": len(self.plan.windows),
        }

    @property
    def n_bytes(self) -> int:
        """Of the file, but for some hundred."""
        return self.plan.n_bytes(self.k)

    def open(self) -> int:
        """Make the unfinished file, or take the one that is there; the windows that are done."""
        if not self.unfinished.exists():
            gguf.reserve(self.unfinished, self._metadata, self.plan.tensors(self.k))
        tensors, n = self._mapped(), len(self.plan.windows)
        done = int(tensors["teacher.progress"][0])
        if not 0 <= done <= n:
            raise PyggmlError(
                f"{self.unfinished}: says that {done:,} of {n:,} windows are done: {_INSTEAD}"
            )
        tensors["teacher.documents"][:] = self.plan.documents
        tensors["teacher.documents"].flush()
        return done

    def _mapped(self) -> dict[str, np.memmap[Any, Any]]:
        """The tensors of the unfinished file, to write to."""
        tensors = {name: (dtype, shape) for name, dtype, shape in self.plan.tensors(self.k)}
        try:
            file = gguf.open(self.unfinished)
        except GGUFError as error:
            raise PyggmlError(f"{error}: {_INSTEAD}") from None
        with file:
            changed = [k for k, value in self._metadata.items() if not _is_same(file.get(k), value)]
            there = {name: (t.dtype, t.shape) for name, t in file.tensors.items()}
            offsets = {name: t.offset for name, t in file.tensors.items()}
        if changed or there != tensors:
            what = " and ".join(_WORDS[key] for key in changed if key in _WORDS)
            what = what or "teacher, text or setting"
            raise PyggmlError(f"{self.unfinished}: was begun with another {what}: {_INSTEAD}")
        return {
            name: np.memmap(self.unfinished, dtype.numpy, "r+", offsets[name], shape)
            for name, (dtype, shape) in tensors.items()
            if 0 not in shape
        }

    def run(self) -> Iterator[int]:
        """Read the windows that are left; yields how many are done, after each."""
        done, tensors = self.open(), self._mapped()
        teacher = TeacherModel(self._model, self._lengths, *self._how)
        schedules = [schedule(graph, self._model.devices) for graph in teacher.graphs]
        arenas = Arenas(*schedules)
        programs = [bind(each, True, arenas) for each in schedules]
        try:
            for i in range(done, len(self.plan.windows)):
                self._read(teacher, programs, tensors, *self.plan.windows[i])
                done = i + 1
                if done % _EACH == 0:
                    _note(tensors, done)
                yield done
        finally:
            _note(tensors, done)

    def _read(
        self,
        teacher: TeacherModel,
        programs: Sequence[Program],
        tensors: dict[str, np.memmap[Any, Any]],
        part: int,
        window: int,
    ) -> None:
        data: Dataset = self._parts[part]
        answers = teacher.distributions(programs, data, window)
        (keys, starts), at = self.plan.documents.T, 0
        for key, n in document_keys(data.part(np.array([window]))):
            first, rows = int(starts[np.searchsorted(keys, key)]), slice(at, at + n)
            tensors["teacher.ids"][first : first + n] = answers.ids[rows]
            tensors["teacher.log_probs"][first : first + n] = answers.log_probs[rows]
            at += n

    def finish(self) -> None:
        """Put the file in its place."""
        self.unfinished.replace(self.path)


def _is_same(there: object, value: object) -> bool:
    """Whether a value of a file is this one, but for the rounding of a float32."""
    if type(there) is not type(value):
        return False
    if isinstance(there, float) and isinstance(value, float):
        return abs(there - value) <= 1e-6 * abs(value)
    return bool(there == value)


def _note(tensors: dict[str, np.memmap[Any, Any]], done: int) -> None:
    """Note how many windows are done, after their numbers are on the disk."""
    for name in ("teacher.ids", "teacher.log_probs"):
        tensors[name].flush()
    tensors["teacher.progress"][0] = done
    tensors["teacher.progress"].flush()
