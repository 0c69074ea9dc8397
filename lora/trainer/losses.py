"""The objective of a run over windows: their loss, and in training their gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.data import Dataset, WindowBatch
from pyggml.lora.objectives.objective import Lesson, LossNet, Objective, Task, Windows
from pyggml.lora.objectives.tally import Tally
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.trainer.experts import BALANCE, LOAD, ExpertReport
from pyggml.lora.trainer.overlap import Before, run_overlapping
from pyggml.lora.trainer.passes import Passes
from pyggml.lora.trainer.validation import ValidationSample
from pyggml.models import Inputs
from pyggml.runtime import Arenas, bind, schedule

_Read = tuple[float, Mapping[str, np.ndarray]]  # a batch's loss, and what is read beside it


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mean loss over some windows, and what the objective counts of them.

    parts     (n, 2), each batch's part of the loss, and its weight in it
    experts   the load of a mixture's experts; None of other models
    """

    loss: float
    tally: Tally
    parts: np.ndarray
    experts: ExpertReport | None = None


class Losses:
    """An objective with the planned graphs of one run, without memory so far."""

    def __init__(self, objective: Objective, parameters: Parameters, task: Task) -> None:
        """Raises ConfigError if the corpus has no rows for the objective."""
        self.objective, self._size, corpus = objective, task.config.batch, task.corpus
        self._n_figures = objective.n_figures(corpus)
        self.feed, self.practice = objective.feed(task), objective.practice(task)
        beside = 0 if self.practice is None else self.practice.n_bytes
        self.passes = Passes.of(
            task.model, parameters, task.config, corpus.train.ctx, corpus.lengths,
            objective=objective, leaves=self.feed.leaves, further=self.feed.graphs,
            beside=beside,
        )  # fmt: skip

    def over(
        self,
        data: Dataset,
        windows: Windows,
        ranks: Ranks = ALONE,
        before: Before = lambda i, part: None,
        after: Callable[[], object] = lambda: None,
        *,
        alone: bool,
    ) -> Outcome:
        """The loss over these windows, whose batches the ranks share.

        before   called with the number of each batch that this rank runs, ahead of it, and None; or
                 ahead of each part of it, with that
        after    called once all batches of this rank have begun; a device may be at them still
        alone    without the gradients, which training adds up
        """
        n, kind = -(-len(windows) // self._size), self.objective.tally
        mine, n_layers, end = ranks.share(n), self.passes.load_shape[0], 2 + self._n_figures
        rows = np.empty((len(mine), end + self._n_expert_numbers))
        batches = self.feed.batches(self.passes.other_programs, data, windows, ranks)
        with ranks.telling():
            each = self._each(alone, islice(batches, mine.start, mine.stop), before, mine.start)
            for i, (batch, read) in enumerate(each):
                if i == len(mine) - 1:
                    after()
                loss, outputs = read()
                tally = self.objective.report(batch, outputs)
                rows[i, :end] = loss, batch.weight, *tally.numbers
                if n_layers:
                    rows[i, end:] = np.append(outputs[LOAD], outputs[BALANCE]) * batch.weight
            if not mine:
                after()
        total, tally = 0.0, kind()
        joined = ranks.join(rows, n)
        for part, _, *numbers in joined[:, :end].tolist():
            total, tally = total + part, tally + kind.of(numbers)
        experts = ExpertReport.of(joined[:, end:].sum(axis=0), n_layers) if n_layers else None
        return Outcome(total, tally, joined[:, :2], experts)

    def _each(
        self, alone: bool, batches: Iterable[WindowBatch], before: Before, first: int
    ) -> Iterator[tuple[WindowBatch, Callable[[], _Read]]]:
        """Each batch, which has begun, with what waits for its loss and what is read beside it.
        first: number of the first one."""
        passes = self.passes
        if passes.n_slots > 1:
            every = [*batches]
            results = run_overlapping(passes, every, alone, lambda k, part: before(first + k, part))
            for batch, read in zip(every, results, strict=True):
                yield batch, partial(_itself, read)
            return
        for i, batch in enumerate(batches, first):
            before(i, None)
            yield batch, partial(_with_outputs, passes.begin(batch, alone), passes)

    def validate(self, data: Dataset, windows: Windows, ranks: Ranks) -> Outcome:
        """What a validation tells of these windows: their loss, or what the practice measures."""
        if self.practice is None:
            return self.over(data, windows, ranks, alone=True)
        measured = self.practice.measure(data, windows, ranks, self.passes.arenas)
        if not isinstance(measured, Lesson):
            return Outcome(*measured)
        outcome = self.over(measured.dataset, measured.windows, ranks, alone=True)
        counted = outcome.tally if measured.tally is None else measured.tally + outcome.tally
        return replace(outcome, tally=counted)

    @property
    def _n_expert_numbers(self) -> int:
        """Numbers of a batch that an ExpertReport is made of."""
        n_layers, n_expert = self.passes.load_shape
        return n_layers * n_expert + 1 if n_layers else 0


def _itself(read: _Read) -> _Read:
    return read


def _with_outputs(end: Callable[[], float], passes: Passes) -> _Read:
    return end(), passes.outputs


def validation_loss(sample: ValidationSample, objective: Objective, task: Task) -> float:
    """The loss of a run's validation, by the model of a task: the one that the run wrote."""
    model, ctx = task.model, task.corpus.train.ctx
    practice, size = objective.practice(task), task.config.batch
    data, windows = replace(sample.dataset, lengths=None), sample.windows  # whole: one graph
    if practice is not None:
        measured = practice.measure(sample.dataset, windows, ALONE, None)
        if not isinstance(measured, Lesson):
            return measured[0]
        data, windows = measured.dataset, measured.windows
    inputs = Inputs.empty(size * ctx, ctx, causal=model.config.causal)
    feed = objective.feed(task)
    leaves = feed.leaves(size * ctx)
    net = LossNet.of(model, inputs, (), gradient=False)
    loss = objective.loss(net, leaves)["loss"]
    schedules = [schedule(g, model.devices) for g in (net.net.graph(loss=loss), *feed.graphs)]
    arenas = Arenas(*schedules)
    program, *rest = (bind(each, True, arenas) for each in schedules)
    total = 0.0
    for batch in feed.batches(rest, data, windows, ALONE):
        batch.fill(inputs)
        leaves.write(batch)
        program()
        total += float(program.read(program.schedule.graph["loss"]))
    return total
