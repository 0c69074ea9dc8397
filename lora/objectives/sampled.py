"""Objectives that learn from answers which the model writes to prompts as it trains.

A step reads as many prompts as it has windows. To each the model writes a group of answers, which
become the windows that the step, or several steps, train on. Ranks share the prompts, and tell each
other what was written; the answers follow from the seed and the step, so nothing of them has to be
kept between two lessons.

A subclass says how the answers become examples. All that is sampled stands in numbers, so that
ranks can exchange it and a checkpoint can hold it:

answer   tokens n, whether it is cut, marks (m,), ids (most), log-probabilities (most)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from pyggml.errors import CheckpointError, ConfigError
from pyggml.lora.data import Corpus, Dataset
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.objectives.objective import Lesson, Objective, Practice, Task, Windows
from pyggml.lora.objectives.tally import Tally
from pyggml.lora.ranks import Ranks
from pyggml.lora.rollouts.sampling import GroupSampler, SampledAnswer, seeds_of
from pyggml.lora.rollouts.windows import Samples, WeighedAnswer
from pyggml.model import Model
from pyggml.runtime import Arenas
from pyggml.settings import of_sampling

Place = tuple[int, ...]  # of a group: the step, its number there, and how often others were tried
_VALIDATION = 1 << 32  # in the place of a step: answers of a validation have seeds of their own


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt, by its window, and the answers to it.

    marks   (n, m) float64, what a subclass notes of each answer; NaN for nothing
    """

    window: int
    answers: Sequence[SampledAnswer]
    marks: np.ndarray

    def numbers(self, most: int) -> np.ndarray:
        """All of it, (k,) float64. most: tokens of an answer."""
        rows = np.zeros((len(self.answers), 2 + self.marks.shape[1] + 2 * most))
        for row, answer, marks in zip(rows, self.answers, self.marks, strict=True):
            n, first = len(answer), 2 + len(marks)
            row[:first] = n, answer.is_cut, *marks
            row[first : first + n] = answer.ids
            row[first + most : first + most + n] = answer.log_probs
        return np.append(rows.reshape(-1), self.window)

    @classmethod
    def of(cls, numbers: np.ndarray, n_answers: int, most: int) -> Group:
        """The inverse of `numbers`."""
        rows = numbers[:-1].reshape(n_answers, -1)
        first, answers = rows.shape[1] - 2 * most, list[SampledAnswer]()
        for row in rows:
            n = int(row[0])
            ids, log_probs = row[first : first + n], row[first + most : first + most + n]
            arrays = ids.astype(np.int32), log_probs.astype(np.float32)
            answers.append(SampledAnswer(*arrays, bool(row[1])))
        return cls(int(numbers[-1]), answers, rows[:, 2:first].copy())


@dataclass(frozen=True, kw_only=True)
class SampledObjective(Objective):
    """An objective whose rows are prompts, and which learns from sampled answers."""

    rows: ClassVar[str] = "prompts"
    defaults: ClassVar[dict[str, Any]] = {"lr": 2e-5, "epochs": 1, "warmup_steps": 10}

    answers: int = of_sampling(
        8,
        "answers that are sampled to each prompt: the group within which they are compared",
        "1 to 1024",
        aliases=("num-generations",),
        brief="answers sampled to each prompt",
    )
    answer_tokens: int = of_sampling(
        128, "most tokens of a sampled answer", "1 to 65536", aliases=("max-completion-length",)
    )

    @property
    def sampled_at(self) -> float:
        """The temperature that answers are drawn at."""
        return 1.0

    @property
    def n_marks(self) -> int:
        """What is noted of each answer: the width of `marks`."""
        return 0

    @abstractmethod
    def examples(self, data: Prompts, groups: Sequence[Group]) -> list[WeighedAnswer]:
        """What is learned of a step's groups."""

    @abstractmethod
    def count(self, groups: Sequence[Group]) -> Tally:
        """What is told of some groups."""

    @abstractmethod
    def cost(self, tally: Any) -> float | None:
        """What a validation tells of answers of which this was counted: the lower, the better. None
        if it tells their loss."""

    def marks(
        self, data: Prompts, window: int, answers: Sequence[SampledAnswer], model: Model
    ) -> np.ndarray:
        """(n, m) what is noted of answers to a prompt, on the rank that has sampled them."""
        return np.empty((len(answers), 0))

    def answer_of_row(
        self, data: Prompts, window: int, draw: float, model: Model
    ) -> SampledAnswer | None:
        """What is learned in the place of sampled answers; None: these are. draw: 0 to 1, by
        chance."""
        return None

    def is_of_use(self, group: Group) -> bool:
        """Whether something is learned of a group; else other prompts take its place."""
        return True

    @property
    def n_tried(self) -> int:
        """How many prompts are tried at most for a group that is of use."""
        return 1

    def about(self, model: Model, data: Prompts, groups: Sequence[Group]) -> dict[str, Any]:
        """What a record holds of a step's groups: the first answer."""
        first, prompt = groups[0].answers[0], data.prompt(groups[0].window)
        return {"prompt": model.tokenizer.decode(prompt), "answer": first.text(model)}

    def practice(self, task: Task) -> Practice:
        return SampledPractice(self, task)


def check_prompts(corpus: Corpus, objective: SampledObjective) -> None:
    """ConfigError for a corpus of other rows, and for prompts that leave too little room."""
    parts = corpus.parts
    if not all(isinstance(part, Prompts) for part in parts):
        fault = f"is {objective.name}, but the corpus has no prompts"
        raise ConfigError([("objective", fault)])
    most = max(int(np.count_nonzero(part.documents >= 0, axis=1).max()) for part in parts)
    if most + objective.answer_tokens > parts[0].ctx + 1:
        fault = f"is {parts[0].ctx}: the longest prompt has {most} tokens, an answer up to "
        fault += f"{objective.answer_tokens} (--answer-tokens): wanted at least "
        raise ConfigError([("ctx", f"{fault}{most + objective.answer_tokens - 1}")])


class SampledPractice:
    """The lessons of one run; see `Practice`."""

    def __init__(self, objective: SampledObjective, task: Task) -> None:
        check_prompts(task.corpus, objective)
        self._objective, self._model, self._ctx = objective, task.model, task.corpus.train.ctx
        self._seed, self.state = task.config.seed, np.empty(0)
        self._sampler = GroupSampler(
            task.model, objective.answers, self._ctx, objective.answer_tokens, objective.sampled_at
        )

    @cached_property
    def n_bytes(self) -> int:
        return self._sampler.n_bytes

    def lesson(
        self, step: int, data: Dataset, windows: np.ndarray, ranks: Ranks, arenas: Arenas | None
    ) -> Lesson:
        data, objective = cast("Prompts", data), self._objective
        n_steps, n_done = objective.steps_a_lesson, step % objective.steps_a_lesson
        if n_done and len(self.state):
            self._check(self.state, data, len(windows))
        else:
            self._sampler.begin(arenas)
            self.state = self._sample(step, data, windows, ranks, objective.answers)
        groups = self._groups(self.state, len(windows))
        is_last = n_done == n_steps - 1
        if is_last:
            self.state = np.empty(0)
        samples = Samples.of(objective.examples(data, groups), self._ctx)
        n_read, tally = len(windows) if is_last else 0, objective.count(groups)
        about = objective.about(self._model, data, groups)
        return Lesson(samples, range(len(samples)), n_read, tally, about)

    def measure(
        self, data: Dataset, windows: Windows, ranks: Ranks, arenas: Arenas | None
    ) -> Lesson | tuple[float, Tally, np.ndarray]:
        self._sampler.begin(arenas)
        data = cast("Prompts", data)
        numbers = self._sample(_VALIDATION, data, windows, ranks, 1)
        groups, o = self._groups(numbers, len(windows)), self._objective
        costs = [cost for group in groups if (cost := o.cost(o.count([group]))) is not None]
        if not costs:
            samples = Samples.of(o.examples(data, groups), self._ctx)
            return Lesson(samples, range(len(samples)), len(windows), o.count(groups))
        parts = np.array([[cost, 1] for cost in costs]) / len(groups)
        return float(parts[:, 0].sum()), o.count(groups), parts

    def _groups(self, numbers: np.ndarray, n: int) -> list[Group]:
        most = self._objective.answer_tokens
        m = self._n_of_answer
        return [Group.of(row, len(row) // m, most) for row in numbers.reshape(n, -1)]

    def _check(self, numbers: np.ndarray, data: Prompts, n: int) -> None:
        """CheckpointError for numbers, read from a file, that are not those of n groups."""
        o, m = self._objective, self._n_of_answer
        fits = numbers.shape == (n * (o.answers * m + 1),)
        if fits:
            rows = numbers.reshape(n, -1)
            answers, most = rows[:, :-1].reshape(-1, m), o.answer_tokens
            ids = answers[:, -2 * most : -most]
            fits = bool(
                ((rows[:, -1] >= 0) & (rows[:, -1] < len(data))).all()
                and ((answers[:, 0] >= 1) & (answers[:, 0] <= most)).all()
                and ((ids >= 0) & (ids < self._model.config.n_vocab)).all()
                and np.isfinite(answers[:, -most:]).all()
            )
        if not fits:
            raise CheckpointError("the checkpoint's sampled answers are not those of this run")

    def _sample(
        self, step: int, data: Prompts, windows: Windows, ranks: Ranks, n_answers: int
    ) -> np.ndarray:
        """The numbers of the groups of some prompts, of all ranks, (n · k,)."""
        rows, most = [], self._objective.answer_tokens
        with ranks.telling():
            for i in ranks.share(len(windows)):
                find = self._group if step == _VALIDATION else self._useful_group
                rows.append(find(data, int(windows[i]), (step, i), n_answers).numbers(most))
        k = n_answers * self._n_of_answer + 1
        return ranks.join(np.array(rows).reshape(len(rows), k), len(windows)).reshape(-1)

    @property
    def _n_of_answer(self) -> int:
        """Numbers that an answer is."""
        return 2 + self._objective.n_marks + 2 * self._objective.answer_tokens

    def _useful_group(self, data: Prompts, window: int, at: Place, n_answers: int) -> Group:
        """The group of a prompt; of another one, drawn from all, while nothing is learned of it."""
        group = self._group(data, window, at, n_answers)
        for i in range(1, self._objective.n_tried):
            if self._objective.is_of_use(group):
                break
            (number,) = seeds_of(1, self._seed, *at, i)
            group = self._group(data, number % len(data), (*at, i), n_answers)
        return group

    def _group(self, data: Prompts, window: int, at: Place, n_answers: int) -> Group:
        prompt, seeds = data.prompt(window), seeds_of(n_answers, self._seed, *at, len(at))
        answer, o = None, self._objective
        if at[0] != _VALIDATION:
            (draw,) = seeds_of(1, self._seed, *at, len(at), 1)
            answer = o.answer_of_row(data, window, draw / 2**64, self._model)
        answers = [answer] * n_answers if answer else self._sampler.sample(prompt, seeds)
        return Group(window, answers, o.marks(data, window, answers, self._model))
