"""The gradient of a step: those of its batches, each computed from 0, then added in their order.

g = 0 + g₁ + g₂ + … + gₙ     of n batches; g₁ where n is 1

The sum does not depend on which rank computed which batch, so neither does the run.
"""

import numpy as np

from pyggml.graph import Graph
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.ops import add_inplace, fill_inplace
from pyggml.runtime import Devices, bind, schedule


def n_gradients(config: TrainConfig, ranks: Ranks = ALONE) -> int:
    """Buffers as long as the parameters that their gradient and its sum take."""
    return int(not config.step_in_backward) + _n_sums(config, ranks)


def _n_sums(config: TrainConfig, ranks: Ranks) -> int:
    if ranks.size == 1:
        return int(config.grad_accum > 1)
    return 3 * (config.grad_accum // ranks.size + 1)  # kept, sent and received


class StepGradient:
    """The buffer `gradient` of some parameters, as the sum of a step's batches."""

    def __init__(self, parameters: Parameters, devices: Devices, ranks: Ranks) -> None:
        self._ranks, self._devices = ranks, devices
        self._parts, totals = parameters.buffers["gradient"], parameters.buffers["total"]
        self._numbers = parameters.gradient
        pairs = [*zip(self._parts, totals, strict=True)]
        of_parts = (
            [fill_inplace(gradient, 0.0) for gradient in self._parts],
            [fill_inplace(total, 0.0) for total in totals],
            [add_inplace(total, gradient) for gradient, total in pairs],
            [add_inplace(gradient, total) for gradient, total in pairs],
        )
        programs = (bind(schedule(Graph.of(*nodes), devices)) for nodes in of_parts)
        self._zero, self._zero_total, self._add_to_total, self._add_total = programs
        self._n = 0  # batches of this rank so far
        self._kept: list[np.ndarray] = []  # their gradients, if there are other ranks

    def begin(self) -> None:
        """Begin a step: the gradient is 0."""
        self._n, self._kept = 0, []
        self._zero()

    def next(self) -> None:
        """Begin a batch, whose backward pass adds its gradient to 0."""
        if self._n:
            self._keep()
            self._zero()
        self._n += 1

    def end(self, n: int) -> None:
        """Make the buffer the sum over a step's n batches, of all ranks."""
        if self._ranks.size > 1:
            if self._n:
                self._keep()
            self._numbers[:] = self._ranks.add(self._kept, n, self._numbers.size)
            for part in self._parts:
                self._devices.note_change(part, self._devices.host)
            self._kept = []
        elif n > 1:
            self._add_total()

    def _keep(self) -> None:
        if self._ranks.size > 1:
            self._devices.gather(*self._parts)
            self._kept.append(self._numbers.copy())
            return
        if self._n == 1:
            self._zero_total()
        self._add_to_total()
