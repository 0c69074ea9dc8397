"""qwen3: as qwen2, without biases; every head of q and k gets an RMS norm before the rotation."""

from __future__ import annotations

from pyggml.models import decoder
from pyggml.models.architecture import Architecture
from pyggml.models.config import ModelConfig
from pyggml.models.net import Net
from pyggml.tensor import Shape, Tensor


def _hidden(net: Net) -> Tensor:
    return decoder.hidden(net, rope_mode="neox")


def _shapes(config: ModelConfig) -> tuple[dict[str, Shape], set[str]]:
    return decoder.shapes(config, q_and_k_norms=True)


QWEN3 = Architecture(name="qwen3", shapes=_shapes, hidden=_hidden, modules=decoder.MODULES)
