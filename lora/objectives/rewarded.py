"""Objectives of rewards: answers are sampled, judged by functions of the user's own, and made
likelier or less so by how much better than their group's mean each is.

loss = −Σ share · min(r·A, clip(r)·A) + β·Σ share · KL
r      ratio of a token's probability to that by which it was sampled, clip(r) that within
       1 − ε … 1 + ε'; of min only clip(r) differs by the sign of the advantage A
KL     e^d − d − 1, d = log p̂ − log p, p̂ the model as it was                  (Schulman 2020)
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from pyggml.errors import ConfigError
from pyggml.graph.arrays import write
from pyggml.graph.tensor import Tensor
from pyggml.lora.data import Dataset, WindowBatch
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.data.records.rows import PromptRow
from pyggml.lora.objectives.answers import WindowAnswers, block_diagonal, pad_to
from pyggml.lora.objectives.objective import Feed, Leaves, LossNet, Outputs, Practice, Task, Windows
from pyggml.lora.objectives.sampled import Group, SampledObjective, check_prompts
from pyggml.lora.objectives.tally import JudgedAnswers
from pyggml.lora.ranks import Ranks
from pyggml.lora.rollouts.rewards import Reward, RewardFault, advantages, is_reward, totals
from pyggml.lora.rollouts.sampling import SampledAnswer
from pyggml.lora.rollouts.windows import ROOM, Samples, WeighedAnswer
from pyggml.model import Model
from pyggml.models import Inputs
from pyggml.ops import add, clamp, exp, expm1, mul, neg, scale, sub, sum_
from pyggml.runtime import Program
from pyggml.settings import of_optimiser, of_sampling, one_of

REWARD_FILES = "reward_files"  # of a run: the digests of the files of its functions


@dataclass(frozen=True, slots=True)
class SampleLeaves(Leaves):
    """The leaves of a batch of T tokens and N terms of the loss; `SampleBatch` explains each."""

    targets: Tensor  # (T,) int32
    read: Tensor  # (T,)
    sampled: Tensor  # (T,)
    reference: Tensor  # (T,)
    shares: Tensor  # (T,)
    members: Tensor  # (N, T), or (1, 1)
    better: Tensor  # (N,)
    worse: Tensor  # (N,)

    @classmethod
    def empty(cls, n_tokens: int, n_answers: int) -> SampleLeaves:
        """n_answers: the terms, each of an answer; 0: each is a token's."""
        t, n = (n_tokens,), n_answers or n_tokens
        of_tokens = dict.fromkeys(("targets", "read", "sampled", "reference", "shares"), t)
        members = (n, n_tokens) if n_answers else (1, 1)
        return cls.of_shapes({"targets"}, **of_tokens, members=members, better=(n,), worse=(n,))


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch(WindowBatch):
    """T tokens as in `WindowBatch`, and the N terms of the loss; float32.

    read            (T,) 1 where a target is a token of an answer
    sampled         (T,) its log-probability by the model that wrote it, else 0
    reference       (T,) that by the model as it was; 0 where nobody asks
    shares          (T,) its weight in the loss
    members         (N, T) 1 / their number at the tokens of each answer, where terms are answers
    better, worse   (N,) share · advantage of each term, where that is above 0, and below
    """

    read: np.ndarray
    sampled: np.ndarray
    reference: np.ndarray
    shares: np.ndarray
    members: np.ndarray
    better: np.ndarray
    worse: np.ndarray

    @property
    def weight(self) -> float:
        return float(self.shares.sum(dtype=np.float64))


@dataclass(frozen=True, kw_only=True)
class RewardObjective(SampledObjective):
    """An objective of rewards; its leaves are `SampleLeaves`.

    scaled       advantages are in standard deviations of their group
    per_answer   a term of the loss is an answer's, else a token's

    `report` reads "log_probs" (T,).
    """

    tally: ClassVar[type[JudgedAnswers]] = JudgedAnswers
    has_reference: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    per_answer: ClassVar[bool] = False

    reward: tuple[Any, ...] = of_optimiser(
        (),
        "function that rewards answers, a program of your own that runs as such: of several the "
        "weighted sum counts; may be given several times",
        "FILE.py:FUNCTION or FILE.py:FUNCTION:WEIGHT",
        lambda words: all(map(is_reward, words)),
        repeated=True,
    )
    reward_seconds: float = of_optimiser(
        10.0, "seconds that a reward of an answer may take (0: any)", "0 to 1e6"
    )
    reward_faults: str = of_optimiser(
        "stop",
        "where a reward raises, is no finite number or takes too long: stop ends the run, skip "
        "leaves the answer out",
        *one_of(("stop", "skip")),
    )
    temperature: float = of_sampling(
        1.0,
        "temperature at which answers are drawn and their probabilities compared",
        "above 0, at most 10",
        aliases=("temp",),
    )
    clip_low: float = of_optimiser(
        0.2,
        "ε: ratios of probabilities count no further below 1",
        "above 0, at most 1",
        aliases=("epsilon",),
    )
    clip_high: float = of_optimiser(
        0.2,
        "ε': ratios of probabilities count no further above 1",
        "above 0, below 1000",
        aliases=("epsilon-high",),
    )
    kl_weight: float = of_optimiser(
        0.0, "β, the weight of the KL from the model as it was (0: none)", "0 to 1000"
    )
    iterations: int = of_optimiser(
        1, "steps that train on the same answers", "1 to 1024", aliases=("num-iterations",)
    )
    mask_cut: bool = of_optimiser(
        False,
        "nothing is learned of answers that were cut at their most tokens",
        aliases=("mask-truncated-completions",),
    )
    dynamic_sampling: int = of_sampling(
        0,
        "how often another prompt takes the place of one whose answers all earn the same, of which "
        "nothing is learned",
        "0 to 100",
    )

    @property
    def steps_a_lesson(self) -> int:
        return self.iterations

    @property
    def sampled_at(self) -> float:
        return self.temperature

    @cached_property
    def functions(self) -> tuple[Reward, ...]:
        """Raises ConfigError if there are none, or one cannot be run."""
        if not self.reward:
            fault = f"is missing: {self.name} wants FILE.py:FUNCTION"
            raise ConfigError([("reward", fault)])
        return tuple(map(Reward.of, self.reward))

    def shared_by_runs(self) -> Mapping[str, Any]:
        """With what the files of rewards say."""
        each = [*zip(self.reward, self.functions if self.reward else (), strict=True)]
        words = [word if isinstance(word, str) else f.name for word, f in each]
        digests = [f.digest for _, f in each]
        return {**super().shared_by_runs(), "reward": words, REWARD_FILES: digests}

    # -- what is learned ------------------------------------------------------------------------

    @abstractmethod
    def token_share(self, n_tokens: int, n_answers: int) -> float:
        """The weight of each token of an answer of so many, of so many answers of a step."""

    def log_ratios(self, batch: SampleLeaves, moved: Tensor) -> Tensor:
        """Of the terms (N,); moved (T,): log-probabilities less those that were sampled by."""
        return moved

    def loss(self, net: LossNet, batch: SampleLeaves) -> Outputs:
        log_probs = neg(net.token_losses(batch.targets, batch.read, self.temperature))
        ratios = exp(self.log_ratios(batch, sub(log_probs, batch.sampled)))
        better = mul(clamp(ratios, -np.inf, 1 + self.clip_high), batch.better)
        worse = mul(clamp(ratios, 1 - self.clip_low, np.inf), batch.worse)
        loss = neg(sum_(add(better, worse)))
        if self.kl_weight:
            d = sub(batch.reference, log_probs)
            kl = sum_(mul(sub(expm1(d), d), batch.shares))
            loss = add(loss, scale(kl, self.kl_weight))
        return {"loss": loss, "log_probs": log_probs}

    def examples(self, data: Prompts, groups: Sequence[Group]) -> list[WeighedAnswer]:
        """Those with a gradient: of answers that are neither better nor worse there is only the
        KL's."""
        n, examples = sum(len(g.answers) for g in groups), list[WeighedAnswer]()
        for group in groups:
            prompt, of_group = data.prompt(group.window), self._advantages(group)
            for answer, advantage in zip(group.answers, of_group.tolist(), strict=True):
                is_masked = self.mask_cut and answer.is_cut
                if (advantage or self.kl_weight) and not is_masked:
                    share = self.token_share(len(answer), n)
                    examples.append(WeighedAnswer(prompt, answer, advantage, share))
        return examples

    def _totals(self, group: Group) -> np.ndarray:
        return totals(group.marks, [f.weight for f in self.functions])

    def _advantages(self, group: Group) -> np.ndarray:
        return advantages(self._totals(group), self.scaled)

    # -- what is judged -------------------------------------------------------------------------

    @property
    def n_marks(self) -> int:
        return len(self.functions)

    def marks(
        self, data: Prompts, window: int, answers: Sequence[SampledAnswer], model: Model
    ) -> np.ndarray:
        """The reward of each answer by each function, (n, functions)."""
        row = data.rows[window]
        return np.array([self._judge(row, answer.text(model)) for answer in answers])

    def _judge(self, row: PromptRow, text: str) -> list[float]:
        try:
            return [function(row, text, self.reward_seconds) for function in self.functions]
        except RewardFault as fault:
            if self.reward_faults == "stop":
                raise
            warnings.warn(f"{fault}: the answer is left out", RuntimeWarning, stacklevel=2)
            return [float("nan")] * len(self.functions)

    @property
    def n_tried(self) -> int:
        return 1 + self.dynamic_sampling

    def is_of_use(self, group: Group) -> bool:
        return bool(self._advantages(group).any())

    # -- what is told ---------------------------------------------------------------------------

    def count(self, groups: Sequence[Group]) -> JudgedAnswers:
        earned = [self._totals(group) for group in groups]
        judged = [each[~np.isnan(each)] for each in earned]
        answers = [answer for group in groups for answer in group.answers]
        return JudgedAnswers(
            reward_sum=float(sum(each.sum() for each in judged)),
            n_judged=sum(map(len, judged)),
            n_answers=len(answers),
            n_answer_tokens=sum(map(len, answers)),
            n_cut=sum(answer.is_cut for answer in answers),
            spread_sum=float(sum(each.std(ddof=1) for each in judged if len(each) > 1)),
            n_groups=sum(len(group.answers) > 1 for group in groups),
            n_alike=sum(len(g.answers) > 1 and not self.is_of_use(g) for g in groups),
        )

    def cost(self, tally: JudgedAnswers) -> float:
        """The mean reward, with its sign turned."""
        return -tally.reward

    def about(self, model: Model, data: Prompts, groups: Sequence[Group]) -> dict[str, Any]:
        """The first answer with what it earned, and the mean of each function."""
        marks = np.concatenate([group.marks for group in groups])
        names = [f.name for f in self.functions]
        about = super().about(model, data, groups)
        earned = zip(names, groups[0].marks[0].tolist(), strict=True)
        about["earned"] = {name: x for name, x in earned if not np.isnan(x)}
        means = {n: m[~np.isnan(m)] for n, m in zip(names, marks.T, strict=True)}
        about["rewards"] = {name: float(m.mean()) for name, m in means.items() if len(m)}
        return about

    def report(self, batch: SampleBatch, outputs: Mapping[str, np.ndarray]) -> JudgedAnswers:
        """How many ratios are clipped, and how far the tokens are from the model as it was."""
        moved = (outputs["log_probs"] - batch.sampled) * batch.read
        if self.per_answer:
            moved = batch.members @ moved
        ratios = np.exp(moved.astype(np.float64))
        clipped = ((ratios > 1 + self.clip_high) & (batch.better > 0)) | (
            (ratios < 1 - self.clip_low) & (batch.worse < 0)
        )
        d = ((batch.reference - outputs["log_probs"]) * batch.read).astype(np.float64)
        return JudgedAnswers(
            n_clipped=int(clipped.sum()),
            n_ratios=int(np.count_nonzero(batch.better) + np.count_nonzero(batch.worse)),
            kl_sum=float((np.expm1(d) - d).sum()) if self.kl_weight else 0.0,
            n_learned=int(np.count_nonzero(batch.read)),
        )

    # -- what a run needs -----------------------------------------------------------------------

    def practice(self, task: Task) -> Practice:
        _ = self.functions  # a file that cannot be run is told now
        if self.answers == 1:
            fault = "is 1: an answer is compared with others of its group, wanted at least 2"
            raise ConfigError([("answers", fault)])
        return super().practice(task)

    def feed(self, task: Task) -> Feed:
        check_prompts(task.corpus, self)
        if noise := task.config.neftune_alpha:
            fault = f"is {noise:g}, but {self.name} compares probabilities with "
            fault += "those that were sampled by, which noise moves: leave it out"
            raise ConfigError([("neftune_alpha", fault)])
        if self.kl_weight and task.reference is None:
            fault = f"is {self.kl_weight:g}: a KL wants the model as it was: give reference=…"
            raise ConfigError([("kl_weight", fault)])
        return SampleFeed(self, task)


class SampleFeed:
    """The batches of one run, and what a fixed model says of their tokens, if one is asked."""

    def __init__(self, objective: RewardObjective, task: Task) -> None:
        self._size, self._per_answer = task.config.batch, objective.per_answer
        self._scorer: TokenScorer | None = None
        if objective.kl_weight and task.reference is not None:
            ctx = task.corpus.train.ctx
            self._scorer = TokenScorer(task.reference, ctx, objective.temperature)
        self.graphs = [] if self._scorer is None else [self._scorer.graph]

    def leaves(self, n_tokens: int) -> SampleLeaves:
        return SampleLeaves.empty(n_tokens, self._size * ROOM * self._per_answer)

    def batches(
        self, programs: Sequence[Program], data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[SampleBatch]:
        data, which = cast("Samples", data), np.asarray(windows, np.int64)
        for i, batch in enumerate(data.batches(which, self._size)):
            part = data.part(which[i * self._size : (i + 1) * self._size])
            reference = np.zeros((len(part), data.ctx), np.float32)
            if self._scorer is not None:
                reference[:] = [self._scorer.score(programs[0], part, i) for i in range(len(part))]
            yield self._batch(batch, part, reference)

    def _batch(self, batch: WindowBatch, data: Samples, reference: np.ndarray) -> SampleBatch:
        answers = WindowAnswers.in_windows(data, ROOM)
        learned = answers.learned & (answers.of >= 0)
        of = np.maximum(answers.of, 0)
        shares = np.take_along_axis(data.shares_of_tokens, of, axis=1) * learned
        terms = np.take_along_axis(data.advantages, of, axis=1) * shares
        arrays = {"read": learned, "sampled": data.log_probs, "shares": shares}
        arrays |= {"reference": reference * learned}
        members = np.zeros((1, 1), np.float32)
        if self._per_answer:
            means = answers.members(mean=True)
            members = block_diagonal(means, self._size)
            terms = (means > 0) @ terms[:, :, None]
        arrays |= {"better": np.maximum(terms, 0), "worse": np.minimum(terms, 0)}
        flat = {name: pad_to(values, self._size) for name, values in arrays.items()}
        return batch.to_batch_of(SampleBatch, **flat, members=members)


class TokenScorer:
    """A model's graph for the log-probabilities of one window's tokens at a temperature; nothing is
    trained."""

    def __init__(self, model: Model, ctx: int, temperature: float) -> None:
        self._inputs, self._leaves = Inputs.empty(ctx), SampleLeaves.empty(ctx, 0)
        net = LossNet.of(model, self._inputs, (), gradient=False)
        log_probs = neg(net.token_losses(self._leaves.targets, self._leaves.read, temperature))
        self.graph = net.net.graph(log_probs=log_probs)

    def score(self, program: Program, data: Dataset, window: int) -> np.ndarray:
        """(ctx,) float32; 0 where a target is not learned. program: `graph`, bound."""
        (batch,) = replace(data).batches([window], 1)
        batch.fill(self._inputs)
        write(self._leaves.targets, batch.targets)
        write(self._leaves.read, (batch.weights > 0).astype(np.float32))
        program()
        return program.read(program.schedule.graph["log_probs"])
