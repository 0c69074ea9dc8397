"""AdamW over flat buffers: clip the gradient to a length, then one OPT_STEP_ADAMW over everything.

g = g · min(1, clip / ‖g‖)      ‖g‖ over all parameters
"""

from __future__ import annotations

from pyggml._jit import compile_for
from pyggml.backends import CPU, write
from pyggml.dtypes import F32
from pyggml.graph import Graph
from pyggml.lora.config import TrainConfig
from pyggml.lora.parameters import Parameters
from pyggml.ops import clip_norm, fill_inplace, opt_step_adamw
from pyggml.schedule import Devices, bind, schedule
from pyggml.tensor import Tensor, window, zeros


class AdamW:
    """An optimiser bound to parameters, whose moments it uses; on the CPU unless told otherwise."""

    def __init__(
        self, parameters: Parameters, config: TrainConfig, devices: Devices | None = None
    ) -> None:
        self.config = config
        gradient = parameters.buffers["gradient"]
        self._norm = clip_norm(gradient, config.clip)
        self._rates = [rate for *_, rate in parameters.groups]
        self._settings = [zeros((7,), F32, "AdamW settings") for _ in parameters.groups]
        updates = [
            opt_step_adamw(*_part(parameters, first, n), settings)
            for (first, n, _), settings in zip(parameters.groups, self._settings, strict=True)
        ]
        devices = devices or Devices([CPU()])
        graphs = (Graph.of(out) for out in (fill_inplace(gradient, 0.0), self._norm, *updates))
        self._zero, self._clip, *self._updates = bind(*(schedule(g, devices) for g in graphs))

    def zero(self) -> None:
        """Set the gradient to 0."""
        self._zero()

    def clip(self) -> float:
        """Shorten the gradient to `config.clip` if it is longer; the length it had."""
        self._clip()
        return float(self._clip.read(self._norm)[0])

    def step(self, lr: float, n: int) -> None:
        """Update the parameters with the gradient; n counts the steps from 1."""
        c = self.config
        hats = (1 / (1 - c.beta1**n), 1 / (1 - c.beta2**n))
        for rate, settings, update in zip(self._rates, self._settings, self._updates, strict=True):
            write(settings, (rate * lr, c.beta1, c.beta2, c.eps, c.weight_decay, *hats))
            update()

    def compile(self) -> None:
        """Have the kernel of `step` ready; nothing is updated."""
        for call in (call for update in self._updates for call in update.calls):
            compile_for(call.kernel, call.arguments)


def _part(p: Parameters, first: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameters, gradient and moments of one group; the buffers themselves if there is one."""
    data, gradient, m, v = (
        b if len(p.groups) == 1 else window(b, first, (n,)) for b in p.buffers.values()
    )
    return data, gradient, m, v
