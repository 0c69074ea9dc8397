"""SGD: a step along the gradient, as ggml's OPT_STEP_SGD takes it. It has no state.

Every number moves in proportion to its own gradient, so a rate that suits one tensor may be small
for another. Rates are far higher than AdamW's: 0.01 to 1 with the gradient's norm clipped to 1.
"""

from collections.abc import Sequence

from pyggml.graph.tensor import Tensor
from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.ops import opt_step_sgd


class FlatSGD(FlatOptimiser):
    """One OPT_STEP_SGD over the flat buffers."""

    moments = ()
    n_settings = 2

    def update(self, data: Tensor, gradient: Tensor, *moments_and_settings: Tensor) -> Tensor:
        (settings,) = moments_and_settings
        return opt_step_sgd(data, gradient, settings)

    def settings(self, lr: float, n: int) -> Sequence[float]:
        return lr, self.config.weight_decay
