"""AdamW: two moments of the gradient, and decoupled weight decay (Loshchilov, Hutter 2019)."""

from collections.abc import Sequence
from typing import ClassVar

from pyggml.graph.tensor import Tensor
from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.ops import opt_step_adamw
from pyggml.ops.optim import adamw_settings


class FlatAdamW(FlatOptimiser):
    """One OPT_STEP_ADAMW over the flat buffers."""

    moments: ClassVar[tuple[str, ...]] = ("m", "v")
    n_settings = 7
    has_squares = True

    def update(self, data: Tensor, gradient: Tensor, *moments_and_settings: Tensor) -> Tensor:
        m, v, settings = moments_and_settings
        return opt_step_adamw(data, gradient, m, v, settings)

    def settings(self, lr: float, n: int) -> Sequence[float]:
        c = self.config
        return adamw_settings(lr, (c.beta1, c.beta2), c.eps, c.weight_decay, n)
