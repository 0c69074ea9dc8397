"""AdamW over flat buffers: clip the gradient to a length, then one OPT_STEP_ADAMW over everything.

g = g · min(1, clip / ‖g‖)      ‖g‖ over all parameters, summed in float64 over fixed chunks, so
                                that the number of threads does not change a bit of it
"""

from __future__ import annotations

from math import isfinite, sqrt

import numpy as np

from pyggml._jit import compile_for
from pyggml.alloc import plan
from pyggml.backends import write
from pyggml.dtypes import F32
from pyggml.graph import Graph
from pyggml.lora.config import TrainConfig
from pyggml.lora.parameters import Parameters
from pyggml.ops import opt_step_adamw
from pyggml.runtime import bind
from pyggml.tensor import leaf, zeros

_CHUNK = 1 << 16  # floats of the gradient that are squared at a time


class AdamW:
    """An optimiser bound to parameters; its moments are theirs."""

    def __init__(self, parameters: Parameters, config: TrainConfig) -> None:
        p = parameters
        self.config, self.gradient = config, p.gradient
        self._settings = zeros((7,), F32, "AdamW settings")
        data, gradient, m, v = (leaf(a) for a in (p.data, p.gradient, p.m, p.v))
        self._update = bind(plan(Graph.of(opt_step_adamw(data, gradient, m, v, self._settings))))
        self._squares = np.empty(_CHUNK, np.float64)

    def clip(self) -> float:
        """Shorten the gradient to `config.clip` if it is longer; the length it had."""
        norm = self._norm()
        if self.config.clip and isfinite(norm) and norm > self.config.clip:
            np.multiply(self.gradient, np.float32(self.config.clip / norm), out=self.gradient)
        return norm

    def step(self, lr: float, n: int) -> None:
        """Update the parameters with the gradient; n counts the steps from 1."""
        c = self.config
        hats = (1 / (1 - c.beta1**n), 1 / (1 - c.beta2**n))
        write(self._settings, (lr, c.beta1, c.beta2, c.eps, c.weight_decay, *hats))
        self._update()

    def compile(self) -> None:
        """Have the kernel of `step` ready; nothing is updated."""
        for call in self._update.calls:
            compile_for(call.kernel, call.arguments)

    def _norm(self) -> float:
        total = 0.0
        for first in range(0, self.gradient.size, _CHUNK):
            g = self.gradient[first : first + _CHUNK]
            squares = self._squares[: g.size]
            squares[:] = g
            np.multiply(squares, squares, out=squares)
            total += float(squares.sum())
        return sqrt(total)
