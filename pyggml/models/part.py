"""What decoders are made of. A part knows the tensors it needs, what it keeps in a cache, and how
to add itself to a graph; parts hold hyperparameters and other parts, and no data.

`at` is where a part stands in the file: "blk.3." for what belongs to block 3, "" outside of blocks.
The same part may stand in many places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from pyggml.models.net import Net
from pyggml.models.weights import Tensors
from pyggml.op import Spec
from pyggml.tensor import Tensor


class Part(ABC):
    """One piece of a decoder."""

    __slots__ = ()

    @abstractmethod
    def tensors(self, at: str) -> Tensors:
        """The tensors this part needs at a place, in the order in which it uses them."""

    @abstractmethod
    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        """Its result for x (T, n_embd)."""

    def state(self, at: str, n_ctx: int) -> Mapping[str, Spec]:
        """What it must remember of earlier tokens: name in Cache.state -> shape and type."""
        return {}


def states(parts: Iterable[Part], at: str, n_ctx: int) -> Mapping[str, Spec]:
    """What all these parts keep at a place."""
    found: dict[str, Spec] = {}
    for part in parts:
        found |= part.state(at, n_ctx)
    return found
