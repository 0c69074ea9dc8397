"""Lion: one moment, and steps that know only signs (Chen et al. 2023).

It keeps half of AdamW's state. Each number moves by the whole learning rate in every step. Lion
therefore needs a third to a tenth of AdamW's rate, and as many times its weight decay.
"""

from collections.abc import Sequence

from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.ops.optim import OPT_STEP_LION


class FlatLion(FlatOptimiser):
    """One opt_step_lion over the flat buffers."""

    op = OPT_STEP_LION
    moments = ("m",)
    n_settings = 4

    def settings(self, lr: float, n: int) -> Sequence[float]:
        c = self.config
        return lr, c.beta1, c.beta2, c.weight_decay
