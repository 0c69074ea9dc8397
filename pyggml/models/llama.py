"""llama: Llama 1 to 3 and Mistral. Rotary pairs are neighbours (2i, 2i+1)."""

from __future__ import annotations

from pyggml.models import decoder
from pyggml.models.architecture import Architecture
from pyggml.models.config import ModelConfig
from pyggml.models.net import Net
from pyggml.tensor import Shape, Tensor


def _hidden(net: Net) -> Tensor:
    return decoder.hidden(net, rope_mode="normal")


def _shapes(config: ModelConfig) -> tuple[dict[str, Shape], set[str]]:
    return decoder.shapes(config)


LLAMA = Architecture(name="llama", shapes=_shapes, hidden=_hidden, modules=decoder.MODULES)
