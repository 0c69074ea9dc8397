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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.backends.cpu import read
from pyggml.errors import CheckpointError, Fault, GGUFError, PyggmlError
from pyggml.files import open_regular
from pyggml.gguf.fields import brief
from pyggml.gguf.identity import Identity
from pyggml.gguf.parse import MAGIC
from pyggml.graph.dtypes import F32
from pyggml.lora.trainer import lock
from pyggml.lora.trainer.arithmetic import Arithmetic
from pyggml.lora.trainer.reports import History
from pyggml.model import Model

_NAME = re.compile(r"step-(\d{8})\.gguf")
_EDGE = 1 << 20  # bytes at both ends of a model file that an older identity is made of
ANOTHER_RUN = "is of another run: "
LENGTH = "length"  # of a run: its steps, which do not make it what it is
_PREFIX, _HISTORY = "checkpoint.", "checkpoint.history."
_SUM, _OLDER_SUM = "checkpoint.sha256", "checkpoint.digest"
Buffers = Mapping[str, np.ndarray]  # (n,) float32 each
Run = Mapping[str, Any]  # what makes a run what it is, by part
_OTHER = {"model": "is another model than that run's", "text": "is another text than that run's"}
TEMPLATE = "template"  # a setting: the digest of the template that chats were written by
_CHANGED = "has another text than in that run: the template was changed"


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


def older_identity(paths: Iterable[Path]) -> str:
    """What older checkpoints have of a model: the size of its files and the SHA-256 of the first
    and last MiB of each.

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
    apart = _apart_from(file, run, usual, free)
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


def _apart_from(file: gguf.GGUFFile, run: Run, usual: Run, free: Collection[str]) -> list[Fault]:
    """What sets a checkpoint's run apart from this one. CheckpointError if it tells of none."""
    theirs = _stored_run(file)
    theirs.pop(LENGTH, None)
    stored, wanted = (
        _fill_in({part: _without(value, free) for part, value in r.items()}, _plain(usual))
        for r in (theirs, _plain(run))
    )
    if TEMPLATE not in stored.get("settings", {}):  # of an older file
        wanted.get("settings", {}).pop(TEMPLATE, None)
    return differences(stored, wanted)


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


def has_older_identity(path: Path) -> bool:
    """Whether a checkpoint knows its model by `older_identity`; False for what is none."""
    try:
        with gguf.open(path) as file:
            stored = file.get("checkpoint.run") is not None and _stored_run(file).get("model")
            return bool(stored) and Identity.of(stored) is None
    except GGUFError as error:
        raise CheckpointError(f"{error}; wanted a checkpoint") from None


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
            by_part[part] = [_setting(part, n, a, b) for n, a, b in apart if _differ(a, b)]
        elif _differ(theirs, ours):
            by_part[part] = [(part, _other_part(part, theirs, ours))]
    if any(by_part.get(cause) for cause in ("adapter", "model")):
        del by_part["tensors"]
    elif by_part.get("tensors"):
        by_part["tensors"] = ["other tensors are trained"]
    if by_part.get("settings"):
        by_part.pop("text", None)
    return [fault for faults in by_part.values() for fault in faults]


def _setting(part: str, name: str, theirs: object, ours: object) -> Fault:
    if name == TEMPLATE and theirs is not None and ours is not None:
        return ("chat_template", _CHANGED)
    return (f"{part}.{name}", _apart(theirs, ours))


def _other_part(part: str, theirs: object, ours: object) -> str:
    there, here = Identity.of(theirs), Identity.of(ours)
    clause = there.difference(here) if there and here else ""
    return ": it ".join(filter(None, [_OTHER.get(part) or _apart(theirs, ours), clause]))


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


IsOurs = Callable[[Path], bool]


def prune(folder: Path, step: int, n_kept: int, is_ours: IsOurs) -> None:
    """Remove all but the n_kept newest checkpoints of a run up to `step`, the one just written.

    What is another run's, or no checkpoint, stays whatever its name, and counts for nothing.
    """
    names = [p for p in existing(folder) if p.name <= path_of(folder, step).name]
    for old in [p for p in names if is_ours(p)][:-n_kept]:
        old.unlink(missing_ok=True)


def strangers(folder: Path, is_ours: IsOurs) -> list[Path]:
    """What has a checkpoint's name in a folder, and is one of another run, or something else. A
    damaged file that begins as a checkpoint does is none of these."""
    return [p for p in existing(folder) if not is_ours(p) and not _is_broken(p)]


def belongs(path: Path, run: Run, usual: Run, free: Collection[str]) -> bool:
    """Whether a file is a checkpoint of this run, of the step that its name says. See `load`."""
    name = _NAME.fullmatch(path.name)
    try:
        with gguf.open(path) as file:
            kind, step = file.get("general.type"), file.get(f"{_PREFIX}step")
            if kind != "checkpoint" or name is None or step != int(name[1]):
                return False
            if Identity.of(_stored_run(file).get("model")) is None:  # of an older version
                run = {**run, "model": _stored_run(file).get("model")}
            return not _apart_from(file, run, usual, free)
    except PyggmlError:
        return False


def _is_broken(path: Path) -> bool:
    """Whether a file may have been a checkpoint: it begins as one, or with nothing, and is none
    that can be read."""
    try:
        with open_regular(path) as file:
            start = file.read(len(MAGIC))
        if start.strip(b"\0") and start != MAGIC:
            return False
        with gguf.open(path):
            return False
    except (OSError, PyggmlError):
        return True
