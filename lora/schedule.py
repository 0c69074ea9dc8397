"""Learning rate as a function of the step, counted from 0, of `n_steps`.

warm-up    lr · (step + 1) / n_warmup                                while step < n_warmup
then       lr_min + (lr − lr_min) · shape(t),   t = (step − n_warmup) / (n_steps − n_warmup)

shape      cosine (1 + cos πt) / 2      linear 1 − t      constant 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

from pyggml.lora.config import TrainConfig

_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda t: (1 + cos(pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "constant": lambda t: 1.0,
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of each of `n_steps` steps; the warm-up takes at most half of them."""

    config: TrainConfig
    n_steps: int

    @property
    def n_warmup(self) -> int:
        return min(self.config.warmup_steps, self.n_steps // 2)

    def __call__(self, step: int) -> float:
        c, n_warmup = self.config, self.n_warmup
        if step < n_warmup:
            return c.lr * (step + 1) / n_warmup
        t = min((step - n_warmup) / max(self.n_steps - n_warmup, 1), 1.0)
        return c.lr_min + (c.lr - c.lr_min) * _SHAPES[c.lr_scheduler](t)
