"""The model file, and the model that is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from pyggml import gguf, load
from pyggml.call import Call
from pyggml.cli.overview import n_parameters, weight_types
from pyggml.cli.show import count, printable, size
from pyggml.errors import PyggmlError
from pyggml.model import Model
from pyggml.models import Taps
from pyggml.schedule import Arenas, ScheduledProgram
from pyggml.tensors import Tensor

_LONGEST = 2000  # characters of a metadata value
_FIRST = 8  # elements of an array that are shown


class Source:
    """A GGUF file. What is no model of a known architecture is shown as a file alone.

    path    as it was given
    fault   why it is no model; "" if it is one

    Raises GGUFError for a file that cannot be read.
    """

    def __init__(self, path: Path, compute: str = "auto") -> None:
        self.path, self.fault = path, ""
        self.file = gguf.open(path)
        self._opened = self._identity()
        self._model: Model | None = None
        try:
            self._model = load(path, compute=compute)
        except PyggmlError as error:
            self.fault = error.said(str)

    @property
    def name(self) -> str:
        return printable(str(self.file.get("general.name", self.path.name)))[:200]

    @property
    def model(self) -> Model:
        """Raises PyggmlError if the file is no model."""
        if self._model is None:
            raise PyggmlError(self.fault)
        return self._model

    def state(self) -> str:
        """Whether the file on the disk is the one that was opened: "there", "changed", "gone"."""
        now = self._identity()
        return "there" if now == self._opened else "changed" if now else "gone"

    def _identity(self) -> list[tuple[int, int, int]] | None:
        try:
            stats = [path.stat() for path in self.file.paths]
        except OSError:
            return None
        return [(s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]

    def about(self) -> dict[str, Any]:
        """The file at a glance: facts, metadata and tensors."""
        return {
            "name": self.name,
            "path": printable(str(self.path)),
            "fault": self.fault,
            "facts": self._facts(),
            "metadata": [
                {"key": printable(key), "type": field.kind, "value": _value(field)}
                for key, field in self.file.metadata.items()
            ],
            "tensors": [
                [t.name, t.dtype.name, list(t.shape), t.n_bytes] for t in self.file.tensors.values()
            ],
        }

    def _facts(self) -> list[tuple[str, str]]:
        file, found = self.file, []
        if self._model is not None:
            c = self._model.config
            found = [
                ("architecture", c.architecture),
                ("blocks", f"{c.n_layer:,}"),
                ("width", f"{c.n_embd:,}"),
                ("context", f"{c.n_ctx:,}"),
                ("vocabulary", f"{c.n_vocab:,}"),
            ]
        found += [
            ("parameters", count(n_parameters(file))),
            ("tensors", f"{len(file.tensors):,}"),
            ("size", size(file.n_bytes)),
            ("types", weight_types(file)),
        ]
        return found


class Watched(Model):
    """The same model; once `stop` is set, what it runs ends before the next kernel: Stopped."""

    def __init__(self, model: Model, stop: Event) -> None:
        self.__dict__.update(vars(model))  # of the same weights, devices and tokenizer
        self.traced, self._stop = None, stop

    def program(
        self, out: Tensor, taps: Taps | None = None, arenas: Arenas | None = None
    ) -> ScheduledProgram:
        made, asked = super().program(out, taps, arenas), Call(self._ask)
        return replace(made, calls=tuple(call for each in made.calls for call in (asked, each)))

    def _ask(self) -> None:
        if self._stop.is_set():
            raise Stopped


class Stopped(Exception):
    """Nobody waits for the result any more."""


def _value(field: gguf.Field) -> str:
    value = field.value
    if isinstance(value, gguf.StringArray | np.ndarray):
        some = ", ".join(repr(v) if isinstance(v, str) else str(v) for v in value[:_FIRST])
        return printable(some[:_LONGEST]) + (", …" if len(value) > _FIRST else "")
    return printable(str(value)[:_LONGEST])
