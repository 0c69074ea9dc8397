"""Groups of answers → the windows that a step trains on, several answers in each.

Each answer follows a copy of its prompt, as in `pyggml.lora.data.windows.answers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.lora.data.windows.answers import Answer, Preferences, fill_windows
from pyggml.lora.rollouts.sampling import SampledAnswer

ROOM = 8  # answers of a window at most


@dataclass(frozen=True, slots=True, eq=False)
class WeighedAnswer:
    """An answer to be learned after its prompt.

    advantage   how much better it is than others to the same prompt; 1 where nobody judges
    share       weight of each of its tokens in the step's loss
    """

    prompt: np.ndarray
    answer: SampledAnswer
    advantage: float
    share: float

    @property
    def document(self) -> Answer:
        ids = np.concatenate([self.prompt, self.answer.ids])
        return Answer(ids, np.arange(len(ids)) >= len(self.prompt), is_wanted=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples(Preferences):
    """Windows of sampled answers.

    log_probs             (n, ctx) float32, of each learned target by the model that wrote it
    advantages, shares    (n, room) float32, of each answer, see `WeighedAnswer`
    """

    log_probs: np.ndarray
    advantages: np.ndarray
    shares_of_tokens: np.ndarray

    @classmethod
    def of(cls, examples: Sequence[WeighedAnswer], ctx: int) -> Samples:
        """Each example has at most ctx + 1 tokens."""
        windows, width = list[list[Answer]](), 0
        for document in (example.document for example in examples):
            if not windows or width + len(document) > ctx + 1 or len(windows[-1]) == ROOM:
                windows.append([])
                width = 0
            windows[-1].append(document)
            width += len(document)
        p = fill_windows(windows, ctx)
        of_answers = np.zeros((2, *p.signs.shape), np.float32)
        numbers = [[e.advantage for e in examples], [e.share for e in examples]]
        of_answers[:, p.signs != 0] = numbers if examples else 0
        log_probs = np.zeros((len(p), ctx), np.float32)
        parts = [np.empty(0, np.float32), *(e.answer.log_probs for e in examples)]
        log_probs[p.targets()] = np.concatenate(parts)
        return cls(
            p.tokens, p.documents, p.trained, signs=p.signs, log_probs=log_probs,
            advantages=of_answers[0], shares_of_tokens=of_answers[1],
        )  # fmt: skip
