"""Config, weights and token inputs -> logits, as a graph; nothing is computed."""

from pyggml.models.build import ARCHITECTURES, Parts, build, build_loss, read
from pyggml.models.config import ModelConfig
from pyggml.models.net import Cache, Inputs, LoraPair, LoraPairs, Net

__all__ = [
    "ARCHITECTURES",
    "Cache",
    "Inputs",
    "LoraPair",
    "LoraPairs",
    "ModelConfig",
    "Net",
    "Parts",
    "build",
    "build_loss",
    "read",
]
