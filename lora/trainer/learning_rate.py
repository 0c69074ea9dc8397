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
from dataclasses import dataclass, fields
from math import cos, isfinite, pi
from typing import ClassVar

from pyggml.errors import ConfigError
from pyggml.lora.config import TrainConfig
from pyggml.lora.trainer.reports import History

# A program's own schedule: the step from 0, of so many, and the losses and validations before it
# -> the learning rate.
ScheduleFunction = Callable[[int, int, History], float]
_MOST = 10.0  # as of TrainConfig.lr
_OF_SETTINGS = ("lr_scheduler", "lr_cycles", "lr_decay", "lr_min", "warmup_steps", "warmup_ratio")


def _cosine(t: float) -> float:
    return (1 + cos(pi * t)) / 2


_SHAPES: dict[str, Callable[[float, TrainConfig], float]] = {
    "constant": lambda t, config: 1.0,
    "linear": lambda t, config: 1 - t,
    "cosine": lambda t, config: _cosine(t),
    "cosine_restarts": lambda t, config: _cosine(t * config.lr_cycles % 1.0 if t < 1 else 1.0),
    "wsd": lambda t, config: min(1.0, (1 - t) / config.lr_decay),
}


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate of each of `n_steps` steps; the warm-up takes at most half of them."""

    config: TrainConfig
    n_steps: int

    @property
    def n_warmup(self) -> int:
        """Steps of the warm-up."""
        return min(self.n_warmup_set, self.n_steps // 2)

    @property
    def n_warmup_set(self) -> int:
        """Those that the settings name."""
        c = self.config
        return round(c.warmup_ratio * self.n_steps) if c.warmup_ratio else c.warmup_steps or 0

    def __call__(self, step: int) -> float:
        c, n_warmup = self.config, self.n_warmup
        if step < n_warmup:
            return c.lr * (step + 1) / n_warmup
        t = min((step - n_warmup) / max(self.n_steps - n_warmup, 1), 1.0)
        return c.lr_min + (c.lr - c.lr_min) * _SHAPES[c.lr_scheduler](t, c)


@dataclass(frozen=True, slots=True)
class OwnLearningRate:
    """The same by a function of the caller's, which replaces all settings of the schedule."""

    function: ScheduleFunction
    n_steps: int
    history: Callable[[], History]  # of the run so far
    n_warmup: ClassVar[int] = 0  # the function's own
    n_warmup_set: ClassVar[int] = 0

    @property
    def name(self) -> str:
        """What a checkpoint calls the function."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def __call__(self, step: int) -> float:
        """Raises ConfigError for what is no learning rate."""
        lr = self.function(step, self.n_steps, self.history())
        if not isinstance(lr, int | float) or not isfinite(lr) or not 0 <= lr <= _MOST:
            fault = (
                f"schedule gives {lr!r} for step {step}, wanted a learning rate of 0 to {_MOST:g}"
            )
            raise ConfigError(fault)
        return float(lr)


def learning_rate_of(
    config: TrainConfig,
    n_steps: int,
    function: ScheduleFunction | None,
    history: Callable[[], History],
) -> LearningRate | OwnLearningRate:
    """That of the settings, or of a function. Raises ConfigError for settings that do nothing
    beside it."""
    if function is None:
        return LearningRate(config, n_steps)
    usual = {f.name: f.default for f in fields(config)}
    idle = [name for name in _OF_SETTINGS if getattr(config, name) != usual[name]]
    if idle:
        raise ConfigError([(name, "does nothing beside a schedule of your own") for name in idle])
    return OwnLearningRate(function, n_steps, history)
