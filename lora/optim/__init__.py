"""Optimisers over flat buffers: clip the gradient to a length, then one step over everything.

g = g · min(1, clip / ‖g‖)      ‖g‖ over all parameters

StepsInBackward takes the step of each tensor within the backward pass instead.

A new one is a file with a subclass of FlatOptimiser, a row of OPTIMISERS, and its name in
pyggml.lora.config.
"""

from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.optim.adamw import FlatAdamW
from pyggml.lora.optim.adamw_8bit import FlatAdamW8bit
from pyggml.lora.optim.in_backward import StepsInBackward
from pyggml.lora.optim.lion import FlatLion
from pyggml.lora.optim.muon import FlatMuon
from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.lora.optim.sgd import FlatSGD

OPTIMISERS: dict[str, type[FlatOptimiser]] = {
    "adamw": FlatAdamW,
    "adamw8bit": FlatAdamW8bit,
    "lion": FlatLion,
    "muon": FlatMuon,
    "sgd": FlatSGD,
}

__all__ = [
    "OPTIMISERS", "FlatAdamW", "FlatAdamW8bit", "FlatLion", "FlatMuon", "FlatOptimiser", "FlatSGD",
    "StepsInBackward", "kept_bytes",
]  # fmt: skip


def kept_bytes(config: TrainConfig, parameters: Parameters) -> int:
    """Bytes kept besides the parameters and their gradient: moments, those that a step is computed
    in, and the best parameters."""
    optimiser = OPTIMISERS[config.optimiser](parameters, config)
    kept = sum(a.nbytes for a in optimiser.state_arrays(parameters).values())
    return kept + optimiser.work_bytes + config.keep_best * parameters.trained_bytes
