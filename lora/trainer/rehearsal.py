"""How long a step takes, found out by making some."""

from collections.abc import Callable

import numpy as np

from pyggml.lora.data import Dataset
from pyggml.lora.trainer.reports import StepReport


def seconds_a_step(
    step: Callable[[], StepReport], windows: Callable[[], np.ndarray], train: Dataset, n_first: int
) -> float:
    """Of a step after the first ones, of windows as long as the mean. windows: of the next step."""
    for _ in range(n_first):
        step()
    of_next = windows()
    share = train.n_computed() / len(train) * len(of_next) / train.n_computed(of_next)
    return step().seconds * share
