"""The log-probability of each choice → which answers are right, by four measures.

measure     the choice with the greatest            as in
acc         log-probability                         lm-evaluation-harness
acc_norm    log-probability / its characters        lm-evaluation-harness
acc_bytes   log-probability / its bytes in UTF-8    lm-evaluation-harness
acc_token   mean log-probability of its tokens      llama.cpp, which calls it acc_norm
match       none: answers are written, see `written`   lm-evaluation-harness's exact_match

`nearest` and `of_10` are of texts that belong together, see `groups`.

Of equal choices the first is taken. How tokens are told from those of the prompt: see `questions`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.lora.evaluate.passes import Hear, log_probs, unheard
from pyggml.lora.evaluate.questions import Question
from pyggml.model import Model

MEASURES = ("acc", "acc_norm", "acc_bytes", "acc_token", "match", "nearest", "of_10")
_OF_CHOICES = MEASURES[:4]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What a model answered to n questions.

    log_probs   for each question, those of its choices, float64
    means       the same, each divided by the number of its tokens, as llama.cpp counts these
    right       measure → (n,) bool
    texts       what it wrote, where answers are written
    """

    log_probs: Sequence[np.ndarray]
    means: Sequence[np.ndarray]
    right: Mapping[str, np.ndarray]
    texts: Sequence[str] = ()


def choose(model: Model, questions: Sequence[Question], report: Hear = unheard) -> Answers:
    """The answers of a model.

    Raises DataError for tokens outside of the model's vocabulary.
    """
    choices = [choice for question in questions for choice in question.choices]
    for choice in choices:
        model.check_tokens(choice.whole.ids)
    by_choice = log_probs(model, [c.whole for c in choices] + [c.own for c in choices], report)
    ends = np.cumsum([len(question.choices) for question in questions])[:-1]
    sums = np.split(np.array([f.sum() for f in by_choice[: len(choices)]]), ends)
    means = np.split(np.array([f.mean() for f in by_choice[len(choices) :]]), ends)
    characters = np.split(np.array([c.n_characters for c in choices]), ends)
    n_bytes = np.split(np.array([c.n_bytes for c in choices]), ends)
    scores = {
        "acc": sums,
        "acc_norm": [s / n for s, n in zip(sums, characters, strict=True)],
        "acc_bytes": [s / n for s, n in zip(sums, n_bytes, strict=True)],
        "acc_token": means,
    }
    answers = np.array([question.answer for question in questions])
    right = {name: np.array([s.argmax() for s in scores[name]]) == answers for name in _OF_CHOICES}
    return Answers(sums, means, right)
