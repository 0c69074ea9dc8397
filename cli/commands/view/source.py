"""The model file, and the model that is made of it."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

from pyggml import gguf, load
from pyggml.cli.commands.inspect import present
from pyggml.cli.commands.inspect.adaptable import adaptable
from pyggml.cli.commands.inspect.facts import facts
from pyggml.cli.commands.inspect.sections import ReportSection
from pyggml.cli.terminal.show import printable
from pyggml.errors import PyggmlError
from pyggml.gguf.identity import identity
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.jit.chains import stages_apart
from pyggml.model import Model
from pyggml.models import Taps
from pyggml.runtime import Arenas, Program


class ViewedFile:
    """A GGUF file. What is no model of a known architecture is shown as a file alone.

    path       as it was given
    fault      why it is no model; "" if it is one
    is_asked   whether it is what the user named: the page begins with it

    Raises GGUFError for a file that cannot be read.
    """

    def __init__(self, path: Path, compute: str = "auto", is_asked: bool = True) -> None:
        self.path, self.fault, self.is_asked = path, "", is_asked
        self.file = gguf.open(path)
        self._opened = self._identity()
        self._compute, self._others = compute, dict[str, tuple[object, Model]]()
        self._model: Model | None = None
        try:
            self._model = load(path, compute=compute)
        except PyggmlError as error:
            self.fault = error.message(str)

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

    def comparison(self, path: Path) -> str:
        """How a model file that a run names compares: "same" contents under whatever name, "other"
        contents, or "unknown": it is not there, and has another name."""
        own = self.file.paths
        if any(path.exists() and path.samefile(p) for p in own if p.exists()):
            return "same"
        try:
            with gguf.open(path) as file:
                is_same = identity(file) == identity(self.file)
            return "same" if is_same else "other"
        except PyggmlError:
            return "same" if path.name in {p.name for p in (self.path, *own)} else "unknown"

    def other(self, path: Path) -> Model:
        """Another whole model, such as a run may write; the last one stays loaded. Raises
        PyggmlError for what is no model."""
        version, kept = _stamps([path]), self._others.get(str(path))
        if kept is None or kept[0] != version:
            self._others = {str(path): (version, load(path, compute=self._compute))}
        return self._others[str(path)][1]

    def _identity(self) -> list[tuple[int, int, int]] | None:
        return _stamps(self.file.paths)

    def about(self) -> dict[str, Any]:
        """What the page begins with: names, the number of blocks, and every tensor."""
        return {
            "name": self.name,
            "path": printable(str(self.path)),
            "fault": self.fault,
            "n_layer": 0 if self._model is None else self._model.config.n_layer,
            "tensors": [
                [t.name, t.dtype.name, list(t.shape), t.n_bytes] for t in self.file.tensors.values()
            ],
        }

    def glance(self, rank: int) -> list[dict[str, Any]]:
        """The file as `pyggml inspect` shows it, but for its tensors; rank: of LoRA's costs."""
        values = facts(self.file)
        if values["file"]["kind"] == "model":
            values["lora"] = adaptable(self.file, rank)
        sections = present.sections(values, None, template=True)
        return [_plain(section) for section in sections if section.title != "tensors"]


class NoSource:
    """What stands for a model where runs alone are shown."""

    name, fault, is_asked = "Runs", "no model was named: pyggml view MODEL --run FOLDER", False

    @property
    def file(self) -> gguf.GGUFFile:
        raise PyggmlError(self.fault)

    @property
    def model(self) -> Model:
        raise PyggmlError(self.fault)

    def state(self) -> str:
        return "there"

    def comparison(self, path: Path) -> str:
        return "none"

    def other(self, path: Path) -> Model:
        raise PyggmlError(self.fault)

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "path": "", "fault": self.fault, "n_layer": 0, "tensors": []}

    def glance(self, rank: int) -> list[dict[str, Any]]:
        return []


def source_of_run(path: Path | None, compute: str) -> ViewedFile | NoSource:
    """The model that a run names, if it is there and can be read."""
    try:
        return NoSource() if path is None else ViewedFile(path, compute, is_asked=False)
    except PyggmlError:
        return NoSource()


def _stamps(paths: Iterable[Path]) -> list[tuple[int, int, int]] | None:
    try:
        stats = [path.stat() for path in paths]
    except OSError:
        return None
    return [(s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]


class StoppableModel(Model):
    """The same model; once `stop` is set, what it runs ends before the next kernel: Stopped."""

    def __init__(self, model: Model, stop: Event) -> None:
        self.__dict__.update(vars(model))  # of the same weights, devices and tokenizer
        self.traces, self._stop = (), stop

    def program(
        self, out: Tensor, taps: Taps | None = None, arenas: Arenas | None = None
    ) -> Program:
        program, check = super().program(out, taps, arenas), Call(self._ask)
        single = chain.from_iterable(map(stages_apart, program.calls))
        calls = tuple(call for each in single for call in (check, each))
        return replace(program, calls=calls)

    def note_rounding(self, *changed: str) -> None:
        """The page says so."""

    def _ask(self) -> None:
        if self._stop.is_set():
            raise Cancelled


class Cancelled(Exception):
    """Nobody waits for the result any more."""


def _plain(section: ReportSection) -> dict[str, Any]:
    """A section as JSON has it."""
    table = section.table
    return {
        "title": section.title,
        "rows": list(section.rows),
        "table": table
        and {"columns": table.columns, "rows": table.rows, "right": sorted(table.right)},
        "text": printable(section.text),
        "notes": list(section.notes),
    }
