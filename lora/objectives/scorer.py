"""Log-probabilities of the answers of a window, without training.

Windows are scored one at a time, so that scores do not depend on the rest of a batch: a resumed run
finds the same numbers.
"""

from __future__ import annotations

import numpy as np

from pyggml.backends.cpu import write
from pyggml.graph import Graph
from pyggml.lora.data import Dataset
from pyggml.lora.objectives.answers import Answers
from pyggml.lora.objectives.losses import Leaves, log_probs
from pyggml.model import Model
from pyggml.models import Inputs
from pyggml.runtime import Program


class Scorer:
    """One model's graph for one window of ctx tokens and at most `room` answers."""

    def __init__(self, model: Model, ctx: int, room: int) -> None:
        self._inputs, self._leaves = Inputs.empty(ctx), Leaves.empty(ctx, room)
        net, _, found = log_probs(model, self._inputs, self._leaves, gradient=False)
        self.graph: Graph = net.graph(log_probs=found)
        self._room = room

    def score(self, program: Program, data: Dataset, window: int) -> np.ndarray:
        """(room,) float32, 0 where there is no answer. program: `graph`, bound."""
        part = data.part(np.array([window]))
        (batch,) = part.batches([0], 1)
        answers = Answers.in_windows(part, self._room)
        for name in ("tokens", "positions", "span"):
            write(getattr(self._inputs, name), getattr(batch, name))
        write(self._leaves.targets, batch.targets)
        write(self._leaves.read, answers.learned.reshape(-1).astype(np.float32))
        write(self._leaves.members, answers.members()[0].astype(np.float32))
        program()
        return program.read(program.schedule.graph["log_probs"])
