"""Why a loss or a gradient is not finite: which window makes it so, and which node."""

from math import isfinite

import numpy as np

from pyggml.errors import Fault, NotFiniteError, TokenizerError, first_names
from pyggml.gguf.fields import brief
from pyggml.lora.data import Dataset
from pyggml.lora.objectives.objective import Windows
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.lora.trainer.losses import Losses
from pyggml.model import Model

MAY_BE_TOO_HIGH: Fault = ("lr", "may be too high")
MAKES_NO_NUMBERS: Fault = "the model's weights or its adapter make no numbers"
_N_FIRST = 12  # tokens of a window that are shown


def divergence(
    what: Fault,
    cause: Fault,
    model: Model,
    losses: Losses,
    gradient: StepGradient,
    alone: bool,
    data: Dataset,
    windows: Windows,
) -> NotFiniteError:
    """The error of a step or a validation: what is not finite, where that begins, and its causes.

    The windows are run one by one, with gradients unless `alone`, until one is not finite either.
    """
    causes = [cause]
    if model.edited:
        edited = first_names(model.edited, 3)
        causes.append(f"what a trace makes of {edited} may lead to no numbers")
    for window in windows:
        gradient.begin()
        loss = losses.over(data, np.array([window]), alone=alone).loss
        if alone and isfinite(loss):
            continue
        node = losses.passes.first_not_finite()
        if node is not None:
            about = f"of window {window + 1}{_beginning(model, data.tokens[window])}"
            first = f"the first number that is not finite is made by {node}, {about}"
            return NotFiniteError([what, first, *causes])
    return NotFiniteError([what, *causes])


def _beginning(model: Model, tokens: np.ndarray) -> str:
    """What a window begins with; nothing if the model has no vocabulary."""
    try:
        tokenizer = model.tokenizer
    except TokenizerError:
        return ""
    return f", which begins with {brief(tokenizer.decode(tokens[:_N_FIRST]))}"
