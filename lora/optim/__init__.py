"""Optimisers over flat buffers: clip the gradient to a length, then one step over everything.

g = g · min(1, clip / ‖g‖)      ‖g‖ over all parameters

A new one is a file with a subclass of FlatOptimiser, a row of OPTIMISERS, and its name in
pyggml.lora.config.
"""

from pyggml.lora.config import TrainConfig
from pyggml.lora.optim.adamw import FlatAdamW
from pyggml.lora.optim.lion import FlatLion
from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.lora.optim.sgd import FlatSGD

OPTIMISERS: dict[str, type[FlatOptimiser]] = {
    "adamw": FlatAdamW,
    "lion": FlatLion,
    "sgd": FlatSGD,
}

__all__ = ["OPTIMISERS", "FlatAdamW", "FlatLion", "FlatOptimiser", "FlatSGD", "n_kept"]


def n_kept(config: TrainConfig) -> int:
    """Numbers kept for each parameter besides its gradient: the moments, and the best value."""
    return len(OPTIMISERS[config.optimiser].moments) + config.keep_best
