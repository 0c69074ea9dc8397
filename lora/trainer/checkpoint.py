"""A run's whole state as one GGUF file.

general.type      "checkpoint"
checkpoint.step, .epoch, .index     steps made; windows read of the epoch under way
checkpoint.run    JSON: what makes the run what it is, `identity.run_identity`, and its length
checkpoint.compute, .vectors, .compiler     what computed it: `arithmetic.RunArithmetic`
checkpoint.sha256 SHA-256 of all that is here: `_whole_digest`. Older files have checkpoint.digest,
                  that of the numbers, which is then all that is checked
checkpoint.lesson   `objective.Practice.state`, where the next step goes on with it
checkpoint.history.losses, .validation.steps, .losses, .tokens      `reports.History`
the flat float32 buffers: parameters, and of them by name the tensors that are kept as F16 or BF16;
                  the optimiser's moments (adamw.m, adamw.v; codes of 8 bits are I8); constants, the
                  length of the last gradient, and the parameters that validated best, if a run has
                  them

The order of the windows follows from seed and epoch, the learning rate from the step: nothing else
has a state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import CheckpointError, GGUFError, PyggmlError
from pyggml.gguf.fields import brief
from pyggml.graph.dtypes import BF16, F16, F32, I8, DType
from pyggml.lora.trainer.arithmetic import RunArithmetic
from pyggml.lora.trainer.identity import (
    LENGTH,
    Run,
    differences_to_stored,
    has_older_identity,
    older_identity,
)
from pyggml.lora.trainer.reports import History

ANOTHER_RUN = "is of another run: "
_PREFIX, _HISTORY = "checkpoint.", "checkpoint.history."
_SUM, _OLDER_SUM = "checkpoint.sha256", "checkpoint.digest"
_LESSON, _NO_LESSON = "checkpoint.lesson", np.empty(0)
Buffers = Mapping[str, np.ndarray]  # float32, int8, float16, or uint16 of BF16's bits
_TYPES = {np.dtype(d.numpy): d for d in (F32, I8, F16, BF16)}


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file tells beside the numbers. length: the steps that its run was to have; older files
    do not say. lesson: (n,) float64, of the lesson under way."""

    progress: Progress
    history: History
    length: int | None
    lesson: np.ndarray


def save(
    path: Path,
    buffers: Buffers,
    progress: Progress,
    history: History,
    run: Run,
    arithmetic: RunArithmetic,
    lesson: np.ndarray = _NO_LESSON,
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
    if len(lesson):
        metadata[_LESSON] = lesson
    fields = {key: gguf.Field.of(value) for key, value in metadata.items()}
    fields[_SUM] = gguf.Field.of(_whole_digest(fields, buffers))
    gguf.write(path, fields, [(name, _type(b), b.shape, b) for name, b in buffers.items()])


def load(
    path: Path,
    buffers: Buffers,
    run: Run,
    arithmetic: RunArithmetic,
    model_files: Iterable[Path] = (),
) -> Checkpoint:
    """Put a checkpoint's numbers into the buffers; where the run stood, and what came before.

    model_files: of the run's model, which a checkpoint of an older version knows by their bytes.

    Raises CheckpointError, and changes nothing, if the file is damaged or of another run: the
    sentence names the settings that differ. Warns if its run had another vector unit,
    Python or Numba.
    """
    try:
        with gguf.open(path) as file:
            _check(file, run, model_files)
            arithmetic.check(file)
            return _load(file, buffers)
    except GGUFError as error:
        raise CheckpointError(f"{error}; wanted a checkpoint") from None


def _check(file: gguf.GGUFFile, run: Run, model_files: Iterable[Path]) -> None:
    """CheckpointError for what is no checkpoint, or none of this run."""
    kind = file.get("general.type")
    if not isinstance(kind, str) or kind != "checkpoint":
        named = "missing" if kind is None else brief(kind)
        raise CheckpointError(f"{file.path}: general.type is {named}, wanted 'checkpoint'")
    if not _matches(file):
        raise CheckpointError(f"{file.path}: is damaged: its content does not match its SHA-256")
    stored = _stored_run(file)
    if has_older_identity(stored):
        run = {**run, "model": older_identity(model_files)}
    faults = differences_to_stored(stored, run)
    if faults:
        raise CheckpointError(faults, f"{file.path}: {ANOTHER_RUN}")


def _load(file: gguf.GGUFFile, buffers: Buffers) -> Checkpoint:
    stored = {}
    for name, buffer in buffers.items():
        info = file.tensors.get(name)
        kind = _type(buffer)
        if info is None or info.dtype is not kind or info.shape != buffer.shape:
            actual = "missing" if info is None else f"{info.dtype} {info.shape}"
            raise CheckpointError(f"{file.path}: {name} is {actual}, wanted {kind} {buffer.shape}")
        stored[name] = file.data(name)
    step, epoch, index = (file.require(f"{_PREFIX}{k}", int) for k in ("step", "epoch", "index"))
    history, length = _history(file), _stored_run(file).get(LENGTH)
    for name, buffer in buffers.items():
        buffer[:] = stored[name]
    progress = Progress(step, epoch, index)
    lesson = file.get(_LESSON)
    if not isinstance(lesson, np.ndarray) or lesson.dtype != np.float64:
        lesson = _NO_LESSON
    return Checkpoint(progress, history, length if type(length) is int else None, lesson)


def _type(buffer: np.ndarray) -> DType:
    return _TYPES[buffer.dtype]


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


def is_of_run(path: Path, step: int, run: Run) -> bool:
    """Whether a file is a checkpoint of this run, after this step. Its numbers are not read."""
    try:
        with gguf.open(path) as file:
            stands = file.require("general.type", str), file.require(f"{_PREFIX}step", int)
            if stands != ("checkpoint", step):
                return False
            stored = _stored_run(file)
            if has_older_identity(stored):  # whose model is not looked at
                run = {**run, "model": stored["model"]}
            return not differences_to_stored(stored, run)
    except PyggmlError:
        return False


def is_whole(path: Path) -> bool:
    """Whether a file is a checkpoint as it was written."""
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
