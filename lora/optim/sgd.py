"""SGD: a step along the gradient, as ggml's OPT_STEP_SGD takes it. It has no state.

Every number moves in proportion to its own gradient, so a rate that suits one tensor may be small
for another. Rates are far higher than AdamW's: 0.01 to 1 with the gradient's norm clipped to 1.
"""

from collections.abc import Sequence

from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.ops.optim import OPT_STEP_SGD


class FlatSGD(FlatOptimiser):
    """One OPT_STEP_SGD over the flat buffers."""

    op = OPT_STEP_SGD
    moments = ()
    n_settings = 2

    def settings(self, lr: float, n: int) -> Sequence[float]:
        return lr, self.config.weight_decay
