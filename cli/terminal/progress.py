"""The progress of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING

from pyggml.cli.terminal.notebook import notebook, show_in_cell
from pyggml.cli.terminal.show import is_quiet, percent, progress_lines, row, say, say_progress, span
from pyggml.look.limits import share_of_limit, training_seconds
from pyggml.lora import CheckpointReport, History, Report, StepReport, Trainer, ValidationReport
from pyggml.lora.objectives import Tally

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.text import Text

_RECENT = 20  # steps that loss and speed are averaged over
_EVERY = 10.0  # seconds between two lines
_COMPILED = 120.0  # a step that takes longer than this is no measure of the compiler


class Countdown:
    """The time that passes will take, by those after the first, which may compile."""

    def __init__(self) -> None:
        self._began = 0.0

    def seconds_left(self, done: int, n: int) -> float | None:
        """Seconds, after each pass; None while they are unknown."""
        if done == 1:
            self._began = perf_counter()
        return (perf_counter() - self._began) / (done - 1) * (n - done) if done > 1 else None

    def say_left(self, done: int, n: int) -> None:
        """Print the time left on standard error: once, after the second pass."""
        left = self.seconds_left(done, n) if done <= 2 else None
        if left:
            say_progress(f"some {span(left)} left")


class ChangingLine:
    """One line on standard error that is written over on a terminal, in plain characters; elsewhere
    nothing."""

    def __init__(self) -> None:
        self._width = 0
        self.is_shown = sys.stderr.isatty() and not is_quiet()

    def show(self, text: str) -> None:
        """Put this text in the place of the last one; "" leaves an empty line to go on in."""
        if not self.is_shown:
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        end = "\r" if not text else ""
        say_progress(f"{text:<{self._width}}", end=end, begin="\r")
        self._width = len(text)


class Meter:
    """A run's figures after each step, averaged over the last ones.

    The first step may compile, so its time does not count, unless it is so long that compiling
    hardly matters; on a device the second does not either (`n_first`).

    least: anew → the seconds that a token takes at least on this machine, asked for after the first
    step, when its kernels are compiled, and once more if a step takes less; None where that is
    unknown
    """

    def __init__(
        self,
        history: History | None = None,
        n_first: int = 1,
        least: Callable[[bool], float | None] = lambda anew: None,
    ) -> None:
        self.history = history or History()
        self._n_first, self._ask_least = n_first, least
        self._least: float | None = None
        self._asked_again = False
        self.first: StepReport | None = None
        self.last: StepReport | None = None
        self._warned = False
        self._began = 0.0
        self._estimated = False
        self._recent: deque[StepReport] = deque(maxlen=_RECENT)

    @classmethod
    def of(cls, trainer: Trainer) -> Meter:
        """That of a run; several processes share a machine in ways that no limit tells."""
        alone = trainer.ranks.size == 1
        least = partial(training_seconds, trainer.model) if alone else lambda anew: None
        return cls(trainer.history, trainer.n_first, least)

    def add(self, report: Report) -> None:
        if isinstance(report, StepReport):
            if self._n_first == 1:
                self._least = self._ask_least(False)
            if self._n_first > 0:
                self.first, self._began = report, perf_counter()
                self._n_first -= 1
            elif self.last is self.first:
                self._recent.clear()
            self.last = report
            self._recent.append(report)

    @property
    def loss(self) -> float:
        """Mean of the last steps."""
        return fmean(s.loss for s in self._recent)

    @property
    def tally(self) -> Tally | None:
        """What the objective counts of the last steps together."""
        tallies = [s.tally for s in self._recent if s.tally is not None]
        return sum(tallies[1:], tallies[0]) if tallies else None

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(s.seconds for s in self._recent)
        return sum(s.n_tokens for s in self._recent) / seconds if seconds else 0.0

    @property
    def share(self) -> str:
        """How much of what this machine can do; empty if unknown, or if a step may compile."""
        seconds = sum(s.seconds for s in self._recent)
        if self._least is None or not seconds or self.last is self.first:
            return ""
        n_computed = sum(s.n_computed for s in self._recent)
        return (
            f"{percent(share_of_limit(self._least_seconds, n_computed, seconds))} of this machine"
        )

    def _least_seconds(self, anew: bool) -> float | None:
        if anew and not self._asked_again:
            self._least, self._asked_again = self._ask_least(True), True
        return self._least

    @property
    def each(self) -> float | None:
        """Seconds from step to step, including validations and checkpoints; None if unknown."""
        assert self.first is not None and self.last is not None
        n_steps = self.last.step - self.first.step
        if n_steps:
            return (perf_counter() - self._began) / n_steps
        return self.first.seconds if self.first.seconds > _COMPILED else None

    @property
    def left(self) -> str:
        """The time to the end; empty if it is unknown or over."""
        assert self.last is not None
        each, n_left = self.each, self.last.n_steps - self.last.step
        return f"{span(each * n_left)} left" if each is not None and n_left else ""

    def estimate(self) -> str | None:
        """The length of the run: once, as soon as it is known."""
        each, left = self.each, self.left
        if self._estimated or each is None or not left:
            return None
        self._estimated = True
        return f"{span(each)} a step, {left}"

    def warning(self) -> str | None:
        """A warning of a rising loss: once, as soon as the rise is more than noise."""
        if self._warned or not self.history.has_doubled:
            return None
        self._warned = True
        return rise(self.history)


def change(history: History) -> str:
    """The losses at both ends of a run."""
    means = f" (means of {history.n_averaged} steps)" if history.n_averaged > 1 else ""
    return "{:.4f} → {:.4f}".format(*history.ends()) + means


def rise(history: History) -> str:
    """What to say of a loss that has more than doubled."""
    return "the loss more than doubled, {:.3f} → {:.3f}: --lr may be too high".format(
        *history.ends()
    )


def words(tally: Tally | None) -> str:
    """How well it goes, as a part of a line: nothing if the objective counts nothing."""
    return "" if tally is None else f"  {tally.words}"


def count_printer(what: str) -> Callable[[int, int], None]:
    """Prints how many of something are done, every 10 s: nothing of what is quick."""
    said = perf_counter()

    def count(done: int, of: int) -> None:
        nonlocal said
        if perf_counter() - said >= _EVERY:
            said = perf_counter()
            with progress_lines():
                say(f"{what}: {done} of {of}")

    return count


Display = Callable[[Report], None]  # receives every report, after the meter


class Lines:
    """For pipes and files: the first two steps and the last, one every 10 s, every validation."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._last_line = meter, 0.0

    def __call__(self, report: Report) -> None:
        has_news = tell(report, self._meter)
        if isinstance(report, StepReport):
            is_end = report is self._meter.first or report.step == report.n_steps
            if has_news or is_end or perf_counter() - self._last_line >= _EVERY:
                self._step(report)

    def _step(self, s: StepReport) -> None:
        self._last_line, m = perf_counter(), self._meter
        left, right = "".join(f", {x}" for x in (m.share, m.left) if x), words(m.tally)
        with progress_lines():
            say(
                f"step {s.step}/{s.n_steps}  loss {m.loss:.4f}{right}  lr {s.lr:.2e}"
                f"  |g| {s.grad_norm:.3g}  {m.tokens_per_second:,.0f} tokens/s{left}"
            )


@progress_lines()
def tell(report: Report, meter: Meter) -> bool:
    """Print what deserves a line of its own; whether there was such a thing."""
    if isinstance(report, CheckpointReport):
        row(f"step {report.step}", f"checkpoint {report.path}")
    elif isinstance(report, ValidationReport):
        right = words(report.tally)
        about = f" ± {report.margin:.2g}" if report.margin is not None else ""
        experts = f"  {report.experts.words}" if report.experts is not None else ""
        row(f"step {report.step}", f"validation loss {report.loss:.4f}{about}{right}{experts}")
    else:
        estimate, warning = meter.estimate(), meter.warning()
        if estimate:
            row("time", estimate)
        if warning:
            row("warning", warning)
        return bool(estimate or warning)
    return True


Parts = Sequence[tuple[int, str]]  # importance, 0 the highest, and text; in the order of display


def words_that_fit(parts: Parts, room: int) -> str:
    """The most important words that fit into so many columns; always the first one."""
    kept: list[tuple[int, str]] = []
    for part in sorted(p for p in parts if p[1]):
        if not kept or len(_join(parts, [*kept, part])) <= room:
            kept.append(part)
    return _join(parts, kept)


def _join(parts: Parts, kept: Parts) -> str:
    return "  ".join(text for importance, text in parts if (importance, text) in kept)


class Bar:
    """For terminals: one line that stays at the bottom, below all that is printed."""

    def __init__(self, meter: Meter, progress: Progress, n_steps: int) -> None:
        self._meter, self._progress = meter, progress
        start = [(0, "validating"), (1, "before the first step")]
        self._task = progress.add_task("", total=n_steps, now=start)

    def __call__(self, report: Report) -> None:
        if self._meter.last is not None:
            self._progress.update(self._task, completed=report.step, now=self._now())
        elif isinstance(report, ValidationReport):
            start = [(0, "first step"), (1, "compiling if need be")]
            self._progress.update(self._task, now=start)
        tell(report, self._meter)

    def _now(self) -> Parts:
        m = self._meter
        assert m.last is not None
        held_out, counted = m.history.validations, words(m.tally).split("  ")[1:]
        share = counted[-1:]  # that is right: the rewards before it give way to the rate
        return [
            (0, f"loss {m.loss:.3f}"),
            *enumerate(counted[:-1], 5),
            *((2, text) for text in share),
            (3, f"lr {m.last.lr:.1e}"),
            (4, f"|g| {m.last.grad_norm:.2g}"),
            (8, f"validation {held_out[-1].loss:.3f}" if held_out else ""),
            (9, f"{m.tokens_per_second:,.0f} tokens/s"),
            (10, m.share),
            (1, m.left),
        ]


_SHORTEST = 5  # columns of a bar that still says something
_CELL = 100  # columns of a notebook's cell


@contextmanager
def show_run(trainer: Trainer) -> Iterator[Callable[[Report], None]]:
    """A callback of `Trainer.run` that shows the run: what it does where no other is asked for."""
    meter = Meter.of(trainer)
    with display(meter, trainer.n_steps, trainer.progress.step) as show:

        def report(event: Report) -> None:
            meter.add(event)
            show(event)

        yield report


@contextmanager
def display(meter: Meter, n_steps: int, done: int) -> Iterator[Display]:
    """The display for standard output, for a run with `done` steps already made."""
    shell = notebook()
    if is_quiet() or not (shell or sys.stdout.isatty()):
        yield Lines(meter)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn
    from rich.table import Column
    from rich.text import Text

    whole = Column(no_wrap=True)

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            n = len(str(n_steps))
            return Text(f"step {int(task.completed):{n}}/{n_steps}", style="progress.download")

    class Now(ProgressColumn):
        def render(self, task: Task) -> Text:
            taken = len(f"step {n_steps}/{n_steps}  ") + _SHORTEST
            return Text(words_that_fit(task.fields["now"], progress.console.width - taken))

    progress = Progress(
        Count(table_column=whole),
        BarColumn(None),
        Now(table_column=whole),
        console=Console(width=_CELL if shell else None),
    )
    bar = Bar(meter, progress, n_steps)
    progress.update(progress.task_ids[0], completed=done)
    if shell:
        yield from show_in_cell(progress, bar)
        return
    with progress:
        yield bar
