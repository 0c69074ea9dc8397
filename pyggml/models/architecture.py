"""What one architecture declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyggml.models.config import ModelConfig
from pyggml.models.net import Net
from pyggml.tensor import Shape, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`.

    shapes    config -> (tensor name -> shape, names that may be absent)
    hidden    net -> hidden states after the last norm, (T, n_embd)
    modules   the linear modules of a block, which adapters target by default
    """

    name: str
    shapes: Callable[[ModelConfig], tuple[dict[str, Shape], set[str]]]
    hidden: Callable[[Net], Tensor]
    modules: tuple[str, ...]
