"""Windows → the numbers of a batch's leaves.

A batch has S answers: `room` for each window, in their order. A pair's two answers stand side by
side. Unused answers have share, sign and members 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.lora.config import PreferenceConfig
from pyggml.lora.data import Batch, Dataset
from pyggml.lora.data.answers import Preferences, ordinals


@dataclass(frozen=True, slots=True, eq=False)
class AnswerBatch(Batch):
    """T tokens as in `Batch`, and the S answers among them; float32.

    read        (T,) 1 where a target's loss is used at all
    members     (S, T) 1 where a target is a learned token of the answer, 1 / their number for means
    nll         (T,) weight of each target in the NLL of the chosen answers and their prompts
    reference   (S,) the reference's log-probabilities; for KTO, plus the KL
    sign        (S,) 1 for wanted answers, −1 for others
    share       (S,) weight of each answer, or of its pair, in the step's loss
    """

    read: np.ndarray
    members: np.ndarray
    nll: np.ndarray
    reference: np.ndarray
    sign: np.ndarray
    share: np.ndarray

    @property
    def is_there(self) -> np.ndarray:
        return np.asarray(self.sign != 0)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """The answers in some windows.

    Each target (n, ctx) has the number of its answer, −1 for none. Each answer (n, room) has its
    sign, 0 where there is none.
    """

    of: np.ndarray
    learned: np.ndarray
    sign: np.ndarray

    @classmethod
    def in_windows(cls, data: Dataset, room: int) -> Answers:
        number = ordinals(data.documents)
        same = data.documents[:, 1:] == data.documents[:, :-1]
        sign = np.zeros((len(data), room), np.float32)
        rows, columns = np.nonzero(number >= 0)
        odd = data.documents[rows, columns] % 2
        sign[rows, number[rows, columns]] = 1 - 2 * odd
        return cls(np.where(same, number[:, 1:], -1), data.targets(), sign)

    @property
    def n(self) -> int:
        return int(np.count_nonzero(self.sign))

    def members(self) -> np.ndarray:
        """(n, room, ctx) bool: the learned tokens of each answer."""
        numbers = np.arange(self.sign.shape[1])[:, None]
        return np.asarray((self.of[:, None] == numbers) & self.learned[:, None])

    def of_chosen(self) -> np.ndarray:
        """(n, ctx) bool: the tokens of chosen answers and their prompts."""
        return np.asarray((self.of >= 0) & (self.of % 2 == 0))


def batches(
    data: Preferences,
    windows: Sequence[int] | np.ndarray,
    size: int,
    room: int,
    config: PreferenceConfig,
    reference: np.ndarray,
) -> Iterator[AnswerBatch]:
    """The batches of one step over these windows; reference: (n, room), for each of them.

    A pair's share is that of its chosen answer. Shares add up to 1, but for KTO's weights.
    """
    windows = np.asarray(windows, np.int64)
    answers = Answers.in_windows(data.part(windows), room)
    n_tokens = max(int(np.count_nonzero(answers.of_chosen())), 1)
    weight = np.ones_like(answers.sign)
    n_units = answers.n // 2
    if config.objective == "kto":
        n_units = answers.n
        weight = np.where(answers.sign > 0, config.desirable_weight, config.undesirable_weight)
    share = weight * (answers.sign != 0) / max(n_units, 1)
    for i, batch in enumerate(data.batches(windows, size)):
        some = slice(i * size, (i + 1) * size)
        part = Answers(answers.of[some], answers.learned[some], answers.sign[some])
        yield _batch(batch, part, size, config, n_tokens, reference[some], share[some])


def _batch(
    batch: Batch,
    answers: Answers,
    size: int,
    config: PreferenceConfig,
    n_tokens: int,
    reference: np.ndarray,
    share: np.ndarray,
) -> AnswerBatch:
    members = answers.members().astype(np.float32)
    read, nll = answers.learned, np.zeros_like(answers.of, np.float32)
    if config.objective == "orpo":
        members /= np.maximum(members.sum(axis=2, keepdims=True), 1)
        read = read | answers.of_chosen()
        nll[answers.of_chosen()] = np.float32(1 / n_tokens)
    return AnswerBatch(
        tokens=batch.tokens,
        positions=batch.positions,
        span=batch.span,
        targets=batch.targets,
        weights=batch.weights,
        read=_filled(read, size).reshape(-1),
        members=block_diagonal(members, size),
        nll=_filled(nll, size).reshape(-1),
        reference=_filled(reference, size).reshape(-1),
        sign=_filled(answers.sign, size).reshape(-1),
        share=_filled(share, size).reshape(-1),
    )


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    """Zeros for the windows that only fill up a batch, float32."""
    found = np.zeros((size, *values.shape[1:]), np.float32)
    found[: len(values)] = values
    return found


def block_diagonal(members: np.ndarray, size: int) -> np.ndarray:
    """(n, room, ctx) of each window's own tokens -> (size · room, size · ctx) of all."""
    n, room, ctx = members.shape
    found = np.zeros((size, room, size, ctx), np.float32)
    found[np.arange(n), :, np.arange(n)] = members
    return found.reshape(size * room, size * ctx)
