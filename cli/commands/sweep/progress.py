"""The runs of a sweep, one after the other in this process.

Each is claimed by a lock, so that several processes, beside each other or on several machines,
share the runs of a folder. What a run prints is in NAME.log.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout

from pyggml.cli.commands.finetune.job import Job
from pyggml.cli.commands.finetune.stages import Around
from pyggml.cli.commands.finetune.stages import run as train
from pyggml.cli.commands.sweep.halving import Halving, Judge
from pyggml.cli.commands.sweep.lists import SweepRun
from pyggml.cli.commands.sweep.results import (
    FAILED,
    FINISHED,
    HOPELESS,
    OVER,
    Result,
    note,
    place_of,
    results_of,
    state_of,
)
from pyggml.cli.terminal.exit import STOPPED, option
from pyggml.cli.terminal.paths import beside
from pyggml.cli.terminal.progress import ChangingLine
from pyggml.cli.terminal.show import progress_lines, say, span
from pyggml.errors import PyggmlError
from pyggml.lora import Report, StepReport, Trainer, ValidationReport
from pyggml.lora.trainer import lock

Saves = Callable[[Job], None]  # writes a run's settings beside its adapter


def run_all(
    runs: Sequence[SweepRun], halving: Halving | None, again: str, save_settings: Saves
) -> bool:
    """Make the runs that are neither over nor another process's; whether none was stopped.

    again: the command line that goes on
    """
    for i, run in enumerate(runs, 1):
        with ExitStack() as stack:
            if state_of(run)[0] in OVER or not _claim(run, stack):
                continue
            if state_of(run)[0] in OVER:  # another process has just ended it
                continue
            with progress_lines():
                say(f"run {i} of {len(runs)}   {run.words}")
            if not _Attempt(run, halving, f"run {i} of {len(runs)}").make(again, save_settings):
                return False
            with progress_lines():
                say(f"           {_sentence(results_of([run])[0])}")
    return True


def _claim(run: SweepRun, stack: ExitStack) -> bool:
    """Make the run this process's until the stack ends; False where it is another's."""
    try:
        stack.enter_context(lock.hold(place_of(run)))
    except PyggmlError:
        if not lock.is_held(place_of(run)):
            raise
        return False
    return True


def _sentence(result: Result) -> str:
    if result.state == FAILED:
        return f"failed: {result.why}"
    loss = "" if result.loss is None else f"loss {result.loss:.4f} "
    return f"{result.state}: {loss}after {result.n_steps:,} steps, {span(result.seconds)}"


class _Attempt:
    """One run: made, watched, and noted."""

    def __init__(self, run: SweepRun, halving: Halving | None, label: str) -> None:
        self._run, self._halving, self._label = run, halving, label
        self._judge: Judge | None = None
        self._line = ChangingLine()
        self._hopeless = self._begun = False

    def make(self, again: str, save_settings: Saves) -> bool:
        """Whether the run is over, well or not; else it was stopped."""
        job, why = self._run.job, ""
        try:
            with (
                beside(job.output, ".log").open("a", encoding="utf-8") as log,
                redirect_stdout(log),
            ):
                code = train(job, Around(lambda job, folder: again, save_settings, self._watch))
        except PyggmlError as error:
            if not self._begun:  # another run would fail alike
                raise
            code, why = 0, PyggmlError(error.faults[:1], error.about).message(option)
        self._line.show("")
        if code == STOPPED and not self._hopeless:
            return False
        state = FAILED if why else HOPELESS if self._hopeless else FINISHED
        note(self._run, state, why)
        if self._judge is not None:
            self._judge.end(results_of([self._run])[0].loss if not why else None, self._hopeless)
        shutil.rmtree(str(job.train.checkpoint_dir), ignore_errors=True)
        return True

    def _watch(self, trainer: Trainer) -> Callable[[Report], None]:
        if self._halving is not None:
            self._judge = self._halving.judge(self._run, trainer)

        def hear(report: Report) -> None:
            if isinstance(report, StepReport):
                self._begun = True
                self._line.show(f"{self._label}: {report}")
            if not isinstance(report, ValidationReport) or self._judge is None or trainer.is_done:
                return
            if self._judge.is_hopeless(report):
                self._hopeless = True
                trainer.stop()

        return hear
