"""The learning rate as a function of the step, counted from 0, of `n_steps`.

warm-up    lr · (step + 1) / n_warmup                                while step < n_warmup
then       lr_min + (lr − lr_min) · shape(t),   t = (step − n_warmup) / (n_steps − n_warmup)

shape      constant           1
           linear             1 − t
           cosine             (1 + cos πt) / 2                       (Loshchilov, Hutter 2017)
           cosine_restarts    cosine of the fraction of t · lr_cycles: it starts anew at lr
           wsd                1, then linear to 0 in the last lr_decay of t: warm-up, stable, decay
                              (Hu et al. 2024)
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

from pyggml.lora.config import TrainConfig


def _cosine(t: float) -> float:
    return (1 + cos(pi * t)) / 2


def _restarts(t: float, config: TrainConfig) -> float:
    return _cosine(t * config.lr_cycles % 1.0 if t < 1 else 1.0)


def _stable_then_decay(t: float, config: TrainConfig) -> float:
    return min(1.0, (1 - t) / config.lr_decay)


_SHAPES: dict[str, Callable[[float, TrainConfig], float]] = {
    "constant": lambda t, config: 1.0,
    "linear": lambda t, config: 1 - t,
    "cosine": lambda t, config: _cosine(t),
    "cosine_restarts": _restarts,
    "wsd": _stable_then_decay,
}


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate of each of `n_steps` steps; the warm-up takes at most half of them."""

    config: TrainConfig
    n_steps: int

    @property
    def n_warmup(self) -> int:
        """Steps of the warm-up."""
        c = self.config
        wanted = round(c.warmup_ratio * self.n_steps) if c.warmup_ratio else c.warmup_steps
        return min(wanted, self.n_steps // 2)

    def __call__(self, step: int) -> float:
        c, n_warmup = self.config, self.n_warmup
        if step < n_warmup:
            return c.lr * (step + 1) / n_warmup
        t = min((step - n_warmup) / max(self.n_steps - n_warmup, 1), 1.0)
        return c.lr_min + (c.lr - c.lr_min) * _SHAPES[c.lr_scheduler](t, c)
