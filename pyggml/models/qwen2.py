"""qwen2: Qwen 2 and 2.5. Biases on q, k and v; rotary pairs are halves apart (i, i + d/2)."""

from __future__ import annotations

from pyggml.models import decoder
from pyggml.models.architecture import Architecture
from pyggml.models.config import ModelConfig
from pyggml.models.net import Net
from pyggml.tensor import Shape, Tensor


def _hidden(net: Net) -> Tensor:
    return decoder.hidden(net, rope_mode="neox")


def _shapes(config: ModelConfig) -> tuple[dict[str, Shape], set[str]]:
    return decoder.shapes(config)


QWEN2 = Architecture(name="qwen2", shapes=_shapes, hidden=_hidden, modules=decoder.MODULES)
