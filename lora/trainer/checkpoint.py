"""A run's whole state as one GGUF file, and whether a file is of this run.

general.type      "checkpoint"
checkpoint.step, .epoch, .index     steps made; windows read of the epoch under way
checkpoint.run    JSON: what makes the run what it is (model, text, settings, tensors), and its
                  length
checkpoint.compute, .vectors, .compiler     what computed it: `arithmetic.Arithmetic`
checkpoint.sha256 SHA-256 of all that is here: `_whole_digest`. Older files have checkpoint.digest,
                  that of the numbers, which is then all that is checked
checkpoint.history.losses, .validation.steps, .losses, .tokens      `reports.History`
the flat float32 buffers: parameters, the optimiser's moments (adamw.m, adamw.v); constants and the
                  parameters that validated best, if a run has them

The order of the windows follows from seed and epoch, the learning rate from the step: nothing else
has a state.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.backends.cpu import read
from pyggml.errors import CheckpointError, Fault, GGUFError, PyggmlError
from pyggml.gguf.fields import brief
from pyggml.graph.dtypes import F32
from pyggml.lora.trainer import lock
from pyggml.lora.trainer.arithmetic import Arithmetic
from pyggml.lora.trainer.reports import History
from pyggml.model import Model

_NAME = re.compile(r"step-(\d{8})\.gguf")
_EDGE = 1 << 20  # bytes at both ends of a model file that its identity is made of
ANOTHER_RUN = "is of another run: "
LENGTH = "length"  # of a run: its steps, which do not make it what it is
_PREFIX, _HISTORY = "checkpoint.", "checkpoint.history."
_SUM, _OLDER_SUM = "checkpoint.sha256", "checkpoint.digest"
Buffers = Mapping[str, np.ndarray]  # (n,) float32 each
Run = Mapping[str, Any]  # what makes a run what it is, by part
_OTHER = {"model": "is another model than that run's", "text": "is another text than that run's"}


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps made, and windows read of the epoch under way: the whole position in the data."""

    step: int = 0
    epoch: int = 0
    index: int = 0

    def after(self, n_read: int, n_windows: int) -> Progress:
        """One step later, in which n_read windows of the epoch's n_windows were read."""
        index = self.index + n_read
        if index < n_windows:
            return Progress(self.step + 1, self.epoch, index)
        return Progress(self.step + 1, self.epoch + 1, 0)


def identity(paths: Iterable[Path]) -> str:
    """The size of a model's files and the SHA-256 of the first and last MiB of each.

    Raises CheckpointError if one cannot be read.
    """
    size, digest = 0, hashlib.sha256()
    for path in paths:
        try:
            n = path.stat().st_size
            with path.open("rb") as file:
                digest.update(file.read(_EDGE))
                file.seek(max(n - _EDGE, 0))
                digest.update(file.read(_EDGE))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        size += n
    return f"{size} bytes, {digest.hexdigest()[:32]}"


def adapters_identity(model: Model) -> str:
    """SHA-256 of a model's adapters."""
    digest = hashlib.sha256()
    for pairs in model.adapters:
        for name, pair in pairs.items():
            digest.update(f"{name} {pair.scale!r}".encode())
            for t in (pair.a, pair.b):
                digest.update(read(t).tobytes())
    return digest.hexdigest()[:32]


def _whole_digest(metadata: Mapping[str, gguf.Field], tensors: Buffers) -> str:
    """SHA-256 of all values but itself, with keys and types, and of all tensors."""
    digest = hashlib.sha256()
    for key, field in sorted(metadata.items()):
        if key != _SUM:
            digest.update(repr((key, field.kind, len(field.payload))).encode() + field.payload)
    for name, array in sorted(tensors.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _numbers_digest(buffers: Buffers) -> str:
    digest = hashlib.sha256()
    for name, buffer in buffers.items():
        digest.update(name.encode() + buffer.tobytes())
    return digest.hexdigest()


# -- one file -----------------------------------------------------------------------------------


def save(
    path: Path,
    buffers: Buffers,
    progress: Progress,
    history: History,
    run: Run,
    arithmetic: Arithmetic,
) -> None:
    """Write a checkpoint; an older file at `path` stays whole until the new one is complete."""
    metadata = {
        "general.type": "checkpoint",
        "checkpoint.step": np.uint64(progress.step),
        "checkpoint.epoch": np.uint64(progress.epoch),
        "checkpoint.index": np.uint64(progress.index),
        "checkpoint.run": json.dumps(run, sort_keys=True),
        **arithmetic.metadata(),
        **{f"{_HISTORY}{name}": array for name, array in history.arrays().items()},
    }
    fields = {key: gguf.Field.of(value) for key, value in metadata.items()}
    fields[_SUM] = gguf.Field.of(_whole_digest(fields, buffers))
    gguf.write(path, fields, [(name, F32, b.shape, b) for name, b in buffers.items()])


def load(
    path: Path,
    buffers: Buffers,
    run: Run,
    arithmetic: Arithmetic,
    usual: Run | None = None,
    free: Collection[str] = (),
) -> tuple[Progress, History]:
    """Put a checkpoint's numbers into the buffers; where the run stood, and what came before.

    usual: settings by part of the run, which hold where a run has none: so a checkpoint that is
    older than a setting is one of its default.
    free: settings that may be others than that run's.

    Raises CheckpointError, and changes nothing, if the file is damaged or of another run: the
    sentence names the settings that differ. Warns if its run had another vector unit,
    Python or Numba.
    """
    try:
        with gguf.open(path) as file:
            return _load(file, buffers, run, arithmetic, usual or {}, free)
    except GGUFError as error:
        raise CheckpointError(f"{error}; wanted a checkpoint") from None


def _load(
    file: gguf.GGUFFile,
    buffers: Buffers,
    run: Run,
    arithmetic: Arithmetic,
    usual: Run,
    free: Collection[str],
) -> tuple[Progress, History]:
    kind = file.get("general.type")
    if not isinstance(kind, str) or kind != "checkpoint":
        named = "missing" if kind is None else brief(kind)
        raise CheckpointError(f"{file.path}: general.type is {named}, wanted 'checkpoint'")
    if not _matches(file):
        raise CheckpointError(f"{file.path}: is damaged: its content does not match its SHA-256")
    theirs = _stored_run(file)
    theirs.pop(LENGTH, None)
    theirs = {part: _without(value, free) for part, value in theirs.items()}
    stored_run, wanted = (_fill_in(r, _plain(usual)) for r in (theirs, _plain(run)))
    apart = differences(stored_run, wanted)
    if apart:
        raise CheckpointError(apart, f"{file.path}: {ANOTHER_RUN}")
    arithmetic.check(file)
    stored = {}
    for name, buffer in buffers.items():
        info = file.tensors.get(name)
        if info is None or info.dtype is not F32 or info.shape != buffer.shape:
            actual = "missing" if info is None else f"{info.dtype} {info.shape}"
            raise CheckpointError(f"{file.path}: {name} is {actual}, wanted F32 {buffer.shape}")
        stored[name] = file.data(name)
    step, epoch, index = (file.require(f"{_PREFIX}{k}", int) for k in ("step", "epoch", "index"))
    history = _history(file)
    for name, buffer in buffers.items():
        buffer[:] = stored[name]
    return Progress(step, epoch, index), history


def _history(file: gguf.GGUFFile) -> History:
    names = History().arrays()
    arrays = {name: file.get(f"{_HISTORY}{name}") for name in names}
    wrong = [
        f"{_HISTORY}{name} is {brief(a)}, wanted an array of {names[name].dtype}"
        for name, a in arrays.items()
        if not isinstance(a, np.ndarray) or a.dtype != names[name].dtype
    ]
    if not wrong and len({len(a) for name, a in arrays.items() if name != "losses"}) > 1:
        wrong = [f"{_HISTORY}validation has arrays of unlike length"]
    if wrong:
        raise CheckpointError(wrong, f"{file.path}: ")
    return History.of(arrays)


def _stored_run(file: gguf.GGUFFile) -> dict[str, Any]:
    try:
        run = json.loads(file.require("checkpoint.run", str))
    except (ValueError, RecursionError):
        run = None
    if not isinstance(run, dict):
        raise CheckpointError(f"{file.path}: checkpoint.run is no JSON object")
    return run


def stored_length(path: Path) -> int | None:
    """The steps that a checkpoint's run was to have; older files do not tell."""
    with gguf.open(path) as file:
        length = _stored_run(file).get(LENGTH)
    return length if type(length) is int else None


def _without(settings: Any, free: Collection[str]) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {name: value for name, value in settings.items() if name not in free}


def _fill_in(run: Run, usual: Run) -> dict[str, Any]:
    """The run with the usual settings of each part where it has none, or None."""
    filled = dict(run)
    for part, settings in run.items():
        if isinstance(settings, dict):
            given = {name: value for name, value in settings.items() if value is not None}
            filled[part] = usual.get(part, {}) | given
    return filled


def _plain(run: Run) -> dict[str, Any]:
    """As it reads back from JSON: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(run))
    return plain


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Fault]:
    """What sets two runs apart: the settings, and nothing that follows from them."""
    by_part: dict[str, list[Fault]] = {}
    for part in sorted({*stored, *wanted}):
        theirs, ours = stored.get(part), wanted.get(part)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            names = sorted({*theirs, *ours})
            apart = [(name, theirs.get(name), ours.get(name)) for name in names]
            by_part[part] = [(f"{part}.{n}", _apart(a, b)) for n, a, b in apart if _differ(a, b)]
        elif _differ(theirs, ours):
            by_part[part] = [(part, _OTHER.get(part) or _apart(theirs, ours))]
    if any(by_part.get(cause) for cause in ("adapter", "model")):
        del by_part["tensors"]
    elif by_part.get("tensors"):
        by_part["tensors"] = ["other tensors are trained"]
    if by_part.get("settings"):
        by_part.pop("text", None)
    return [fault for faults in by_part.values() for fault in faults]


def _differ(theirs: object, ours: object) -> bool:
    return theirs != ours or type(theirs) is not type(ours)


def _apart(theirs: object, ours: object) -> str:
    there, here = ("not given" if v is None else str(v)[:60] for v in (theirs, ours))
    return f"is {there} there and {here} here"


# -- a folder of them ---------------------------------------------------------------------------


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.gguf"


def existing(folder: Path) -> list[Path]:
    """The folder's checkpoints, oldest step first; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Inside, the folder exists and no other process writes there; folders that were made for it
    and stay empty are removed.

    Raises CheckpointError if it cannot be made, PyggmlError if another run holds it.
    """
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {error.strerror or error}") from error
    try:
        with lock.hold(folder):
            yield
    finally:
        with suppress(OSError):  # which ends at the first one that holds something
            for each in made:
                each.rmdir()


def newest(folder: Path) -> Path:
    """The newest checkpoint of a folder that is whole; those after it are warned about.

    Raises CheckpointError if there is none.
    """
    paths = existing(folder)
    for path in reversed(paths):
        if _is_whole(path):
            return path
        warnings.warn(f"{path}: is damaged; an older one is taken", RuntimeWarning, stacklevel=2)
    raise CheckpointError(f"{folder}: holds no {'whole ' if paths else ''}checkpoint")


def _is_whole(path: Path) -> bool:
    try:
        with gguf.open(path) as file:
            return _matches(file)
    except PyggmlError:
        return False


def _matches(file: gguf.GGUFFile) -> bool:
    """Whether a checkpoint is as it was written, as far as its sum goes."""
    tensors = {name: file.data(name) for name in file.tensors}
    if _OLDER_SUM in file.metadata and _SUM not in file.metadata:
        return file.require(_OLDER_SUM, str) == _numbers_digest(tensors)
    return file.require(_SUM, str) == _whole_digest(file.metadata, tensors)


def prune(folder: Path, step: int, n_kept: int) -> None:
    """Remove all but the n_kept newest checkpoints up to `step`, the one just written."""
    up_to_now = [p for p in existing(folder) if p.name <= path_of(folder, step).name]
    for old in up_to_now[:-n_kept]:
        old.unlink(missing_ok=True)
