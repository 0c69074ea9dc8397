"""A run as it goes: a bar where a terminal is, lines elsewhere."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from pyggml.cli.show import row, say, span
from pyggml.lora import CheckpointReport, Report, StepReport, ValidationReport

if TYPE_CHECKING:
    from rich.progress import Progress

_RECENT = 20  # steps that loss and speed are averaged over
_EVERY = 10.0  # seconds between two lines
_COMPILED = 120.0  # a step that takes longer than this is no measure of the compiler


class Meter:
    """What can be said after each step. The first may compile, so its time does not count, unless
    it is so long that compiling hardly matters."""

    def __init__(self) -> None:
        self.first: StepReport | None = None
        self.last: StepReport | None = None
        self.validations: list[ValidationReport] = []
        self._losses = array("d")
        self._began = 0.0
        self._estimated = False
        self._recent: deque[StepReport] = deque(maxlen=_RECENT)

    def add(self, report: Report) -> None:
        if isinstance(report, ValidationReport):
            self.validations.append(report)
        elif isinstance(report, StepReport):
            if self.first is None:
                self.first, self._began = report, perf_counter()
            elif self.last is self.first:
                self._recent.clear()
            self.last = report
            self._losses.append(report.loss)
            self._recent.append(report)

    @property
    def loss(self) -> float:
        """Mean of the last steps."""
        return fmean(s.loss for s in self._recent)

    def ends(self) -> tuple[float, float]:
        """Mean loss of the first and of the last steps: so many that noise does not rule."""
        n = max(1, min(_RECENT, len(self._losses) // 2))
        return fmean(self._losses[:n]), fmean(self._losses[-n:])

    @property
    def tokens_per_second(self) -> float:
        return sum(s.n_tokens for s in self._recent) / sum(s.seconds for s in self._recent)

    @property
    def each(self) -> float | None:
        """Seconds from step to step, with validations and checkpoints; None if not known yet."""
        assert self.first is not None and self.last is not None
        made = self.last.step - self.first.step
        if made:
            return (perf_counter() - self._began) / made
        return self.first.seconds if self.first.seconds > _COMPILED else None

    @property
    def left(self) -> str:
        """The time to the end, or nothing where it is not known or over."""
        assert self.last is not None
        each, n_left = self.each, self.last.n_steps - self.last.step
        return f"{span(each * n_left)} left" if each is not None and n_left else ""

    def estimate(self) -> str | None:
        """How long the run will be: once, as soon as that is known."""
        each, left = self.each, self.left
        if self._estimated or each is None or not left:
            return None
        self._estimated = True
        return f"{span(each)} a step, {left}"


class Display(Protocol):
    """Hears every report, after the meter did."""

    def __call__(self, report: Report) -> None: ...


class Lines:
    """For pipes and files: the first two steps and the last, one every 10 s, every validation."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._said = meter, 0.0

    def __call__(self, report: Report) -> None:
        if isinstance(report, CheckpointReport):
            row(f"step {report.step}", f"checkpoint {report.path}")
        elif isinstance(report, ValidationReport):
            row(f"step {report.step}", f"validation loss {report.loss:.4f}")
        elif estimate := self._meter.estimate():
            row("time", estimate)
            self._step(report)
        elif report is self._meter.first or self._is_due(report):
            self._step(report)

    def _is_due(self, s: StepReport) -> bool:
        return s.step == s.n_steps or perf_counter() - self._said >= _EVERY

    def _step(self, s: StepReport) -> None:
        self._said, m = perf_counter(), self._meter
        left = f", {m.left}" if m.left else ""
        say(
            f"step {s.step}/{s.n_steps}  loss {m.loss:.4f}  lr {s.lr:.2e}  |g| {s.grad_norm:.3g}"
            f"  {m.tokens_per_second:,.0f} tokens/s{left}"
        )


class Bar:
    """For terminals: one line that stays at the bottom."""

    def __init__(self, meter: Meter, progress: Progress, n_steps: int) -> None:
        self._meter, self._progress = meter, progress
        self._task = progress.add_task("", total=n_steps, now="validating before the first step")

    def __call__(self, report: Report) -> None:
        m = self._meter
        if isinstance(report, StepReport):
            if estimate := m.estimate():
                self._progress.print(f"{'time':<10} {estimate}", markup=False)
            self._progress.update(self._task, completed=report.step, now=self._now())
        elif isinstance(report, ValidationReport) and m.last is None:
            self._progress.update(self._task, now="first step, compiling if need be")

    def _now(self) -> str:
        m = self._meter
        held_out = f"  validation {m.validations[-1].loss:.3f}" if m.validations else ""
        return f"loss {m.loss:.3f}{held_out}  {m.tokens_per_second:,.0f} tokens/s  {m.left}"


@contextmanager
def display(meter: Meter, n_steps: int, done: int) -> Iterator[Display]:
    """The display that fits standard output, for a run of which `done` steps are made already."""
    if not sys.stdout.isatty():
        yield Lines(meter)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(None),
        TextColumn("{task.fields[now]}", markup=False),
    )  # fmt: skip
    with Progress(*columns) as progress:
        bar = Bar(meter, progress, n_steps)
        progress.update(progress.task_ids[0], completed=done)
        yield bar
