"""What a run leaves, and how it ends: checkpoints, the parameters that validated best."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from warnings import warn

from pyggml.lora.ranks import RankLostError
from pyggml.lora.trainer.best import BestParameters
from pyggml.lora.trainer.folder import RunFolder
from pyggml.lora.trainer.plan import RunPlan
from pyggml.lora.trainer.reports import Callback, CheckpointReport


class SavedRun(RunPlan):
    """A run that may stop, be saved, and go on."""

    _stopping = False
    _updating = False  # while the parameters may be half of one step, half of the next

    @property
    def is_done(self) -> bool:
        """Whether all steps are made, or validations say that more would not help."""
        return self.progress.step >= self.n_steps or self.history.has_stalled(self.config.patience)

    def stop(self) -> None:
        """End the run after the step under way; for signal handlers and other threads."""
        self._stopping = True
        if not self.ranks.leaves_time:
            self._rescue()

    def save(self) -> Path:
        """Write a checkpoint of the last whole step now; its path. For callbacks.

        Raises ConfigError if `checkpoint_dir` names no folder.
        """
        path = self._folder.begin(self.progress.step)
        if self.ranks.is_first:
            self._folder.write(self.progress, self.history)
            self._folder.prune()
        return path

    def resume(self, path: str | Path) -> None:
        """Continue from a checkpoint, or the newest whole one of a folder; all that follows is bit
        for bit as without the break. The run may be longer or shorter than it was, and is validated
        and logged as the settings say now.

        Raises CheckpointError for a file that is damaged, of another run, or of another compute
        type. Warns if its run had another vector unit, Python or Numba: bits then differ.
        """
        self.progress, self.history = self._folder.load(Path(path))
        self._best.is_taken = False

    def take_best(self) -> None:
        """With `keep_best`, give the parameters the numbers that validated best. Where no step was
        validated yet, they stay those of the last one. `run` ends so, and takes the last ones back
        if it is called again."""
        self._best.take(self.history, self.progress.step)

    @property
    def output_step(self) -> int:
        """The step that the parameters are of: the last one, or that which validated best."""
        best = self.history.best
        return best.step if self._best.is_taken and best is not None else self.progress.step

    @property
    def is_between_steps(self) -> bool:
        """Whether an error has left the parameters half of one step, half of the next."""
        return self._updating and not self._best.is_taken

    @contextmanager
    def _ended_between_steps(self) -> Iterator[None]:
        """Inside, Ctrl-C ends the run, unless a step is half made. A rank that is lost ends it with
        an error and a checkpoint."""
        try:
            yield
        except KeyboardInterrupt:
            if self._updating:
                raise
        except RankLostError:
            if self.ranks.is_first:
                self._rescue()
            raise

    def _save(self, report: Callback) -> None:
        """Write a checkpoint, if the settings ask for them and this step has none yet."""
        step = self.progress.step
        if self._folder.lacks(step):
            path = self.save()
            if self.ranks.is_first:
                report(CheckpointReport(step, path))

    def _rescue(self) -> None:
        """Save the last whole step at once. A launcher that ends all ranks because one has ended
        leaves them no time for the step under way, and the first may be the one that has ended or
        does not come any more."""
        step, has_last = self.progress.step, not (self._updating or self._best.is_taken)
        if step and has_last and self._folder.lacks(step):
            path = self._folder.begin(step)
            self._folder.write(self.progress, self.history)
            warn(f"stopping: step {step} is saved as {path}", RuntimeWarning, stacklevel=1)

    @cached_property
    def _folder(self) -> RunFolder:
        return RunFolder(self, self._best)

    @cached_property
    def _best(self) -> BestParameters:
        return BestParameters(self.parameters, self.model.devices, self.config.keep_best)
