"""Two models on the same tokens or questions → how far they differ.

What both find hard cancels out, so that a difference is known better than either figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.errors import DataError
from pyggml.look.intervals import Interval, mean, paired_share
from pyggml.lora.evaluate.choices import Answers
from pyggml.lora.evaluate.perplexity import TokenScores


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two shares of right answers: ours minus theirs.

    won, lost: items that ours alone, and theirs alone, got right
    """

    share: Interval
    won: int
    lost: int


def compare_answers(ours: Answers, theirs: Answers) -> Mapping[str, Difference]:
    """By measure. Raises DataError unless both answered as many questions."""
    _check(len(ours.log_probs), len(theirs.log_probs), "questions")
    return {
        name: Difference(paired_share(right, theirs.right[name]), *_won(right, theirs.right[name]))
        for name, right in ours.right.items()
    }


def compare_tokens(ours: TokenScores, theirs: TokenScores) -> tuple[Interval, Difference]:
    """The ratio of the perplexities, ours / theirs, and the difference of the token accuracies.

    Raises DataError unless both scored as many tokens.
    """
    _check(len(ours.losses), len(theirs.losses), "tokens")
    logs = mean(ours.losses - theirs.losses, ours.documents)
    with np.errstate(over="ignore"):
        ratio = Interval(*(float(np.exp(x)) for x in (logs.value, logs.low, logs.high)))
    share = mean(ours.right.astype(np.float64) - theirs.right, ours.documents)
    return ratio, Difference(share, *_won(ours.right, theirs.right))


def _won(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, int]:
    return int((ours & ~theirs).sum()), int((~ours & theirs).sum())


def _check(ours: int, theirs: int, what: str) -> None:
    if ours != theirs:
        raise DataError(f"{ours} and {theirs} {what}, wanted the same {what} to compare")
