"""Lion: one moment, and steps that know only signs (Chen et al. 2023).

It keeps half of AdamW's state. Each number moves by the whole learning rate in every step. Lion
therefore needs a third to a tenth of AdamW's rate, and as many times its weight decay.
"""

from collections.abc import Sequence

from pyggml.graph.tensor import Tensor
from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.ops import opt_step_lion


class FlatLion(FlatOptimiser):
    """One opt_step_lion over the flat buffers."""

    moments = ("m",)
    n_settings = 4

    def update(self, data: Tensor, gradient: Tensor, *moments_and_settings: Tensor) -> Tensor:
        m, settings = moments_and_settings
        return opt_step_lion(data, gradient, m, settings)

    def settings(self, lr: float, n: int) -> Sequence[float]:
        c = self.config
        return lr, c.beta1, c.beta2, c.weight_decay
