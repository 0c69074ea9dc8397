"""Objectives that compare answers: their leaves, their batches and their rewards.

A batch has S answers: `room` for each window, in their order. A pair's two answers stand side by
side, the chosen one first. Unused answers have share, sign and members 0.

The reference never changes. Each window is therefore scored once, when it is first read, and its
scores are kept: one float for each answer. Windows are scored one at a time, so that scores do not
depend on the rest of a batch: a resumed run finds the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from pyggml.errors import ConfigError
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.tensor import Tensor
from pyggml.lora.data import Dataset, WindowBatch
from pyggml.lora.objectives.objective import Feed, Leaves, LossNet, Objective, Task, Windows
from pyggml.lora.objectives.tally import Rewards, Tally
from pyggml.lora.ranks import Ranks
from pyggml.model import Model
from pyggml.models import Inputs
from pyggml.ops import mul, mul_mat, neg, reshape, split, sum_
from pyggml.runtime import Program
from pyggml.settings import of_optimiser

if TYPE_CHECKING:
    from pyggml.lora.data.windows.answers import Preferences

Programs = Sequence[Program]


@dataclass(frozen=True, slots=True)
class AnswerLeaves(Leaves):
    """The leaves of a batch of T tokens and S answers; `AnswerBatch` explains each."""

    targets: Tensor  # (T,) int32
    read: Tensor  # (T,)
    members: Tensor  # (S, T)
    nll: Tensor  # (T,)
    reference: Tensor  # (S,)
    sign: Tensor  # (S,)
    share: Tensor  # (S,)

    @classmethod
    def empty(cls, n_tokens: int, n_answers: int) -> AnswerLeaves:
        t, s = (n_tokens,), (n_answers,)
        of_tokens = {"targets": t, "read": t, "members": (*s, *t), "nll": t}
        return cls.of_shapes({"targets"}, **of_tokens, reference=s, sign=s, share=s)

    def log_probs(self, losses: Tensor) -> Tensor:
        """The log-probability of every answer (S,), of each token's loss (T,): sums, or means where
        `members` says so."""
        return reshape(neg(mul_mat(self.members, reshape(losses, (1, -1)))), (-1,))

    def pairs(self, of_answers: Tensor) -> tuple[Tensor, ...]:
        """The values (S,) of the chosen answers, and of the rejected: (P, 1) each."""
        return split(reshape(of_answers, (-1, 2)), (1, 1), axis=1)

    def mean_of_pairs(self, losses: Tensor) -> Tensor:
        """This batch's part of the mean over the step's pairs (P, 1), a scalar."""
        return sum_(mul(losses, self.pairs(self.share)[0]))


@dataclass(frozen=True, slots=True, eq=False)
class AnswerBatch(WindowBatch):
    """T tokens as in `WindowBatch`, and the S answers among them; float32.

    read        (T,) 1 where a target's loss is used at all
    members     (S, T) 1 where a target is a learned token of the answer, 1 / their number for means
    nll         (T,) weight of each target in the NLL of the chosen answers and their prompts
    reference   (S,) log-probabilities by the reference, plus the KL; 0 without a reference
    sign        (S,) 1 for wanted answers, −1 for others
    share       (S,) weight of each answer, or of its pair, in the step's loss
    kl          how far the model has moved from the reference; 0 where nobody asks
    """

    read: np.ndarray
    members: np.ndarray
    nll: np.ndarray
    reference: np.ndarray
    sign: np.ndarray
    share: np.ndarray
    kl: float = 0.0

    @property
    def weight(self) -> float:
        return float(self.share.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class WindowAnswers:
    """The answers in some windows.

    Each target (n, ctx) has the number of its answer, −1 for none. Each answer (n, room) has its
    sign, 0 where there is none.
    """

    of: np.ndarray
    learned: np.ndarray
    sign: np.ndarray

    @classmethod
    def in_windows(cls, data: Preferences, room: int) -> WindowAnswers:
        same = data.documents[:, 1:] == data.documents[:, :-1]
        sign = np.zeros((len(data), room), np.float32)
        sign[:, : data.room] = data.signs
        return cls(np.where(same, data.ordinals()[:, 1:], -1), data.targets(), sign)

    @property
    def n(self) -> int:
        return int(np.count_nonzero(self.sign))

    def members(self, mean: bool) -> np.ndarray:
        """(n, room, ctx) float32: 1 at each answer's learned tokens; mean: 1 / their number."""
        numbers = np.arange(self.sign.shape[1])[:, None]
        weights = ((self.of[:, None] == numbers) & self.learned[:, None]).astype(np.float32)
        if mean:
            weights /= np.maximum(weights.sum(axis=2, keepdims=True), 1)
        return weights

    def of_chosen(self) -> np.ndarray:
        """(n, ctx) bool: the tokens of wanted answers and their prompts."""
        sign = np.take_along_axis(self.sign, np.maximum(self.of, 0), axis=1)
        return np.asarray((self.of >= 0) & (sign > 0))

    def part(self, which: slice) -> WindowAnswers:
        """The answers of some of the windows."""
        return WindowAnswers(self.of[which], self.learned[which], self.sign[which])


@dataclass(frozen=True, kw_only=True)
class AnswerObjective(Objective):
    """An objective of whole answers after their prompts; its leaves are `AnswerLeaves`.

    per_token       an answer's log-probability is the mean over its tokens, not their sum
    learns_chosen   `nll` weighs the tokens of chosen answers and their prompts
    has_kl          the reference includes the KL

    `report` reads "log_probs" (S,).
    """

    # With the rate of texts rejected answers become unlikely in a few dozen steps.
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 2e-5, "epochs": 1, "warmup_ratio": 0.1}
    tally: ClassVar[type[Tally]] = Rewards
    per_token: ClassVar[bool] = False
    learns_chosen: ClassVar[bool] = False
    has_kl: ClassVar[bool] = False

    beta: float = of_optimiser(
        0.1,
        "β, the strength of the KL penalty: how closely the model is kept to the reference",
        "above 0, at most 100",
        aliases=("beta",),
    )

    def weights(self, sign: np.ndarray) -> np.ndarray:
        """The weight of each answer in the loss, by its sign."""
        return np.ones_like(sign)

    def feed(self, task: Task) -> Feed:
        from pyggml.lora.data.windows.answers import Preferences  # other runs start without it

        if not all(isinstance(part, Preferences) for part in task.corpus.parts):
            fault = f"is {self.name}, but the corpus has no preferences"
            raise ConfigError([("objective", fault)])
        if self.has_reference and task.reference is None:
            fault = f"is {self.name}, which compares answers with a fixed model: give reference=…"
            raise ConfigError([("objective", fault)])
        return AnswerFeed(self, task)

    def report(self, batch: AnswerBatch, outputs: Mapping[str, np.ndarray]) -> Rewards:
        """The rewards of the answers, each counted from the reference."""
        above = self.beta * (outputs["log_probs"] - batch.reference)
        liked, unwanted = batch.sign > 0, batch.sign < 0
        right, kl = self.right(batch, above), self.beta * batch.kl
        return Rewards(
            chosen_sum=float((above[liked] + kl).sum(dtype=np.float64)),
            rejected_sum=float((above[unwanted] + kl).sum(dtype=np.float64)),
            n_chosen=int(liked.sum()),
            n_rejected=int(unwanted.sum()),
            n_right=int(right.sum()),
            n_compared=right.size,
        )

    def right(self, batch: AnswerBatch, above: np.ndarray) -> np.ndarray:
        """Whether each answer is on its side of the KL; above (S,): its reward less β · KL."""
        return np.asarray((above * batch.sign)[batch.sign != 0] > 0)


@dataclass(frozen=True, kw_only=True)
class PairObjective(AnswerObjective):
    """An objective of pairs: rows of prompt, chosen and rejected."""

    rows: ClassVar[str] = "pairs"

    def right(self, batch: AnswerBatch, above: np.ndarray) -> np.ndarray:
        """Whether the chosen answer of each pair has the higher reward."""
        return np.asarray((above[0::2] > above[1::2])[batch.sign[0::2] > 0])


@dataclass(frozen=True, kw_only=True)
class LabelObjective(AnswerObjective):
    """An objective of single answers: rows of prompt, completion and label."""

    rows: ClassVar[str] = "labels"


# -- windows → batches --------------------------------------------------------------------------


def answer_batches(
    objective: AnswerObjective,
    data: Preferences,
    windows: Sequence[int] | np.ndarray,
    size: int,
    reference: np.ndarray,
    kl: float,
) -> Iterator[AnswerBatch]:
    """The batches of one step over these windows; reference: (n, room), for each of them.

    A pair's share is that of its chosen answer. Shares add up to 1, but for an objective's weights.
    """
    windows = np.asarray(windows, np.int64)
    answers = WindowAnswers.in_windows(data.part(windows), reference.shape[1])
    n_tokens = max(int(np.count_nonzero(answers.of_chosen())), 1)
    n_units = answers.n // 2 if objective.rows == PairObjective.rows else answers.n
    share = objective.weights(answers.sign) * (answers.sign != 0) / max(n_units, 1)
    with_kl = reference + np.float32(kl)
    for i, batch in enumerate(data.batches(windows, size)):
        part = slice(i * size, (i + 1) * size)
        arrays = _arrays(objective, answers.part(part), n_tokens)
        arrays |= {"reference": with_kl[part], "share": share[part]}
        filled = {name: pad_to(values, size) for name, values in arrays.items()}
        members = block_diagonal(answers.part(part).members(objective.per_token), size)
        yield batch.to_batch_of(AnswerBatch, **filled, members=members, kl=kl)


def _arrays(
    objective: AnswerObjective, answers: WindowAnswers, n_tokens: int
) -> dict[str, np.ndarray]:
    """What follows from the answers alone, by the names of `AnswerBatch`."""
    read, nll = answers.learned, np.zeros_like(answers.of, np.float32)
    if objective.learns_chosen:
        read = read | answers.of_chosen()
        nll[answers.of_chosen()] = np.float32(1 / n_tokens)
    return {"read": read, "nll": nll, "sign": answers.sign}


def pad_to(values: np.ndarray, size: int) -> np.ndarray:
    """One row of all windows, float32; zeros for those that only fill up a batch."""
    whole = np.zeros((size, values[0].size), np.float32)
    whole[: len(values)] = values.reshape(len(values), -1)
    return whole.reshape(-1)


def block_diagonal(members: np.ndarray, size: int) -> np.ndarray:
    """(n, room, ctx) of each window's own tokens -> (size · room, size · ctx) of all."""
    n, room, ctx = members.shape
    whole = np.zeros((size, room, size, ctx), np.float32)
    whole[np.arange(n), :, np.arange(n)] = members
    return whole.reshape(size * room, size * ctx)


# -- what a fixed model says of each answer -----------------------------------------------------


class AnswerScorer:
    """One model's graph for the log-probabilities of one window's answers; nothing is trained.

    room: the most answers of a window; mean: over an answer's tokens, else their sum
    """

    def __init__(self, model: Model, ctx: int, room: int, mean: bool) -> None:
        self._inputs, self._leaves = Inputs.empty(ctx), AnswerLeaves.empty(ctx, room)
        net = LossNet.of(model, self._inputs, (), gradient=False)
        losses = net.token_losses(self._leaves.targets, self._leaves.read)
        self.graph: Graph = net.net.graph(log_probs=self._leaves.log_probs(losses))
        self._room, self._mean = room, mean

    def score(self, program: Program, data: Preferences, window: int) -> np.ndarray:
        """(room,) float32, 0 where there is no answer. program: `graph`, bound."""
        part = data.part(np.array([window]))
        (batch,) = part.batches([0], 1)
        answers = WindowAnswers.in_windows(part, self._room)
        batch.fill(self._inputs)
        write(self._leaves.targets, batch.targets)
        write(self._leaves.read, answers.learned.reshape(-1).astype(np.float32))
        write(self._leaves.members, answers.members(self._mean)[0])
        program()
        return program.read(program.schedule.graph["log_probs"])


class AnswerFeed:
    """The batches of one run, and the reference's scores so far."""

    def __init__(self, objective: AnswerObjective, task: Task) -> None:
        self._objective, self._size = objective, task.config.batch
        self._room = max(cast("Preferences", part).room for part in task.corpus.parts)
        scored = [task.reference] if objective.has_reference else []
        scored += [task.model] if objective.has_kl else []
        ctx, mean = task.corpus.train.ctx, objective.per_token
        self._scorers = [AnswerScorer(m, ctx, self._room, mean) for m in scored if m is not None]
        self.graphs = [scorer.graph for scorer in self._scorers]
        self._known: dict[tuple[int, int], np.ndarray] = {}  # dataset, window -> (room,)

    def leaves(self, n_tokens: int) -> AnswerLeaves:
        return AnswerLeaves.empty(n_tokens, self._size * self._room)

    def batches(
        self, programs: Programs, data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[AnswerBatch]:
        data = cast("Preferences", data)
        share = ranks.share(-(-len(windows) // self._size))
        mine = slice(share.start * self._size, share.stop * self._size)
        reference = np.zeros((len(windows), self._room), np.float32)
        if self._objective.has_reference:
            with ranks.together():
                reference[mine] = self._references(programs, data, windows[mine])
        kl = self.kl(programs, data, windows, ranks)
        return answer_batches(self._objective, data, windows, self._size, reference, kl)

    def kl(self, programs: Programs, data: Preferences, windows: Windows, ranks: Ranks) -> float:
        """How far the model has moved from the reference, by answers to other prompts; never
        below 0. It is 0 for an objective that does not ask."""
        if not self._objective.has_kl:
            return 0.0
        mismatched = data.mismatched
        assert mismatched is not None
        share = ranks.share(len(windows))
        mine = windows[share.start : share.stop]
        with ranks.telling():
            scores = [self._scorers[1].score(programs[1], mismatched, int(w)) for w in mine]
            moved = self._stack(scores) - self._references(programs, mismatched, mine)
        moved = ranks.join(moved, len(windows))
        n = WindowAnswers.in_windows(mismatched.part(np.asarray(windows, np.int64)), self._room).n
        return max(float(moved.sum(dtype=np.float64)) / n, 0.0)

    def _references(self, programs: Programs, data: Preferences, windows: Windows) -> np.ndarray:
        """The reference's log-probabilities (n, room) float32."""
        numbers = [int(window) for window in windows]
        for window in numbers:
            if (id(data), window) not in self._known:
                score = self._scorers[0].score(programs[0], data, window)
                self._known[id(data), window] = score
        return self._stack([self._known[id(data), window] for window in numbers])

    def _stack(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        return np.array(scores, np.float32).reshape(len(scores), self._room)
