"""The folder of a run's checkpoints: one file for each step that was saved, the newest of which are
kept. One run at a time writes there, and touches nothing of another."""

import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from pyggml import gguf
from pyggml.errors import CheckpointError, ConfigError, PyggmlError, cause_of, first_names
from pyggml.files import open_regular
from pyggml.gguf.parse import MAGIC
from pyggml.lora.optim import OPTIMISERS
from pyggml.lora.trainer import checkpoint, lock
from pyggml.lora.trainer.arithmetic import RunArithmetic
from pyggml.lora.trainer.best import BestParameters
from pyggml.lora.trainer.checkpoint import Buffers, Progress
from pyggml.lora.trainer.identity import LENGTH, Run, run_identity
from pyggml.lora.trainer.plan import RunPlan
from pyggml.lora.trainer.reports import History

_NAME = re.compile(r"step-(\d{8})\.gguf")


class RunFolder:
    """The checkpoints of one run: they are written, and it goes on from one.

    about   what a checkpoint says of its run, and what all ranks share
    last    step of the newest checkpoint that was begun; None before
    """

    def __init__(self, plan: RunPlan, best: BestParameters) -> None:
        self._folder, self._n_kept = plan.config.checkpoint_dir, plan.config.checkpoint_keep
        self._model, self._order, self._run = plan.model, plan.order, run_identity(plan)
        self._parameters, self._optimiser = plan.parameters, plan.config.optimiser
        self._best, self._plan = best, plan
        self.about: Run = {**self._run, LENGTH: plan.n_steps}
        self.last: int | None = None

    @property
    def path(self) -> Path:
        """Raises ConfigError if the settings name none."""
        if self._folder is None:
            raise ConfigError([("checkpoint_dir", "is None, wanted a folder for checkpoints")])
        return Path(self._folder)

    def hold(self) -> AbstractContextManager[None]:
        """`hold`, if the settings name a folder."""
        return nullcontext() if self._folder is None else hold(self.path)

    def check(self, is_new: bool) -> None:
        """CheckpointError if checkpoints would be written among, or over, those of another run.
        is_new: whether the run begins with its first step."""
        if is_new and existing(self.path):
            raise CheckpointError(
                f"{self.path}: holds checkpoints of an earlier run: resume from one, or name "
                "another folder"
            )
        strangers = [p for p in existing(self.path) if not self._has(p) and not _is_broken(p)]
        if strangers:
            raise CheckpointError(
                f"{self.path}: {first_names([p.name for p in strangers])} is of another run, or no "
                "checkpoint: name another folder"
            )

    def lacks(self, step: int) -> bool:
        """Whether the settings ask for checkpoints and this step has none yet."""
        return self._folder is not None and self.last != step

    def begin(self, step: int) -> Path:
        """Note that this step is saved, by this rank or the first; where."""
        path = path_of(self.path, step)
        self.last = step
        return path

    def write(self, progress: Progress, history: History) -> None:
        """Write the checkpoint of the last whole step; of all ranks it has the same bytes."""
        p, path = self._parameters, path_of(self.path, progress.step)
        self._model.devices.gather(*p.trained_leaves, *p.moment_leaves)
        here = RunArithmetic.by(self._model)
        practice = self._plan.losses.practice
        lesson = () if practice is None else (practice.state,)
        checkpoint.save(path, self._buffers, progress, history, self.about, here, *lesson)

    def prune(self) -> None:
        """Remove all but the newest checkpoints up to the last one that was written.

        What is another run's, or no checkpoint, stays whatever its name, and counts for nothing.
        """
        newest_name = path_of(self.path, self.last or 0).name
        names = [p for p in existing(self.path) if p.name <= newest_name]
        for old in [p for p in names if self._has(p)][: -self._n_kept]:
            old.unlink(missing_ok=True)

    def load(self, path: Path) -> tuple[Progress, History]:
        """Take over the numbers of a checkpoint, or of the newest whole one of a folder; where its
        run stood. Raises CheckpointError as `checkpoint.load`, and if that is past this run's end.
        """
        path = newest(path) if path.is_dir() else path
        here, files = RunArithmetic.by(self._model), self._model.file.paths
        stored = checkpoint.load(path, self._buffers, self._run, here, files)
        progress, n_steps, n_read = stored.progress, self._order.n_steps, self._order.n_read
        if progress.step > n_steps:
            raise CheckpointError(
                f"{path}: was made after step {progress.step:,}, and this run ends with step "
                f"{n_steps:,}: more epochs or steps go on from it"
            )
        if progress.index >= n_read:
            raise CheckpointError(
                f"{path}: {progress.index:,} windows of its epoch were read, and an epoch has "
                f"{n_read:,} here: it is of other data"
            )
        if stored.length not in (None, n_steps):
            warnings.warn(
                f"{path}: was of a run of {stored.length} steps, this one has {n_steps}: the "
                "learning rate follows the new length from here on",
                RuntimeWarning,
                stacklevel=3,
            )
        self._parameters.pack(self._model.devices)
        if len(stored.lesson) and (practice := self._plan.losses.practice) is not None:
            practice.state = stored.lesson
        return progress, stored.history

    @property
    def _buffers(self) -> Buffers:
        """What a checkpoint holds, by name."""
        p, name = self._parameters, self._optimiser
        moments = {f"{name}.{m}": a for m, a in OPTIMISERS[name].state_arrays(p).items()}
        constants = {"constants": p.constant_data} if p.constants else {}
        constants |= {"length": p.length} if self._plan.config.step_in_backward else {}
        return p.arrays | moments | constants | self._best.buffers

    def _has(self, path: Path) -> bool:
        """Whether a file is a checkpoint of this run, of the step that its name says."""
        name = _NAME.fullmatch(path.name)
        return name is not None and checkpoint.is_of_run(path, int(name[1]), self._run)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.gguf"


def existing(folder: Path) -> list[Path]:
    """What has a checkpoint's name in a folder, oldest step first; none if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def newest(folder: Path) -> Path:
    """The newest checkpoint of a folder that is whole; those after it are warned about.

    Raises CheckpointError if there is none.
    """
    paths = existing(folder)
    for path in reversed(paths):
        if checkpoint.is_whole(path):
            return path
        warnings.warn(f"{path}: is damaged; an older one is taken", RuntimeWarning, stacklevel=2)
    raise CheckpointError(f"{folder}: holds no {'whole ' if paths else ''}checkpoint")


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Inside, the folder exists and no other process writes there; folders that were made for it
    and stay empty are removed.

    Raises CheckpointError if it cannot be made, PyggmlError if another run holds it.
    """
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {cause_of(error)}") from error
    try:
        with lock.hold(folder):
            yield
    finally:
        with suppress(OSError):  # which ends at the first one that holds something
            for each in new:
                each.rmdir()


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
