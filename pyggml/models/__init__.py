"""Hyperparameters, weights and token inputs -> the graph of the logits. Nothing is computed."""

from pyggml.models.architecture import Architecture
from pyggml.models.architectures import ARCHITECTURES, ENCODERS
from pyggml.models.balance import balance_loss, expert_load
from pyggml.models.build import (
    Parts,
    build,
    build_loss,
    compose,
    logits_among,
    read,
    soft_token_loss,
    token_loss,
    token_losses,
)
from pyggml.models.config import ModelConfig
from pyggml.models.decoder import Decoder
from pyggml.models.low_rank import LoraPair, LoraPairs, Magnitude
from pyggml.models.net import Cache, Inputs, Net
from pyggml.models.shift import Shift, build_shift
from pyggml.models.small import draw, small_metadata, tensors_of
from pyggml.models.taps import Edit, Taps
from pyggml.models.trace import Trace, record
from pyggml.models.weights import TensorSpec

__all__ = [
    "ARCHITECTURES", "ENCODERS", "Architecture", "Cache", "Decoder", "Edit", "Inputs", "LoraPair",
    "LoraPairs", "Magnitude", "ModelConfig", "Net", "Parts", "Shift", "Taps", "TensorSpec", "Trace",
    "balance_loss", "build", "build_loss", "build_shift", "compose", "draw", "expert_load",
    "logits_among", "read", "record", "small_metadata", "soft_token_loss", "tensors_of",
    "token_loss", "token_losses",
]  # fmt: skip
