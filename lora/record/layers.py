"""The gradient's length, block by block: where a run learns, and where it comes apart."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import numpy as np

from pyggml.backends import read
from pyggml.tensors import Tensor


def norm_by_layer(gradients: Mapping[str, Tensor], norm: float) -> dict[str, float]:
    """‖g‖ of each block, or of a matrix outside of all, by name: {"blk.0": 0.3, "output": 0.1}.

    gradients: F32 by tensor name, maybe clipped; norm: the length of all of them before that.
    """
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        g = read(gradient).reshape(-1)
        layer = layer_of(name)
        squares[layer] = squares.get(layer, 0.0) + float(np.dot(g, g))
    whole = sqrt(sum(squares.values()))
    scale = norm / whole if whole else 0.0
    return {layer: scale * sqrt(square) for layer, square in squares.items()}


def layer_of(name: str) -> str:
    """blk.3.attn_q.weight.lora_a -> blk.3; output.weight.lora_b -> output."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "blk" else 1])
