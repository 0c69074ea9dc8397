"""AdamW: two moments of the gradient, and decoupled weight decay (Loshchilov, Hutter 2019)."""

from collections.abc import Sequence
from typing import ClassVar

from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.ops.optim import OPT_STEP_ADAMW, adamw_settings


class FlatAdamW(FlatOptimiser):
    """One OPT_STEP_ADAMW over the flat buffers."""

    op = OPT_STEP_ADAMW
    moments: ClassVar[tuple[str, ...]] = ("m", "v")
    n_settings = 7
    has_squares = True

    def settings(self, lr: float, n: int) -> Sequence[float]:
        c = self.config
        return adamw_settings(lr, (c.beta1, c.beta2), c.eps, c.weight_decay, n)
