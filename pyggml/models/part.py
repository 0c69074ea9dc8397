"""The base class of a decoder's parts: attention, feed-forward, norms, blocks.

A part holds hyperparameters and other parts, but no data. It lists the tensors it needs, lists the
state it keeps in a cache, and adds its ops to a graph.

`at` is the prefix of the part's tensor names: "blk.3." in block 3, "" outside of the blocks. One
part may serve many prefixes: the blocks of a model often share one.
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
        """The tensors that this part needs under a prefix, in order of use."""

    @abstractmethod
    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        """The part's output for x (T, n_embd)."""

    def state(self, at: str, n_ctx: int) -> Mapping[str, Spec]:
        """State kept of earlier tokens: name in Cache.state -> shape and type."""
        return {}


def states(parts: Iterable[Part], at: str, n_ctx: int) -> Mapping[str, Spec]:
    """The state of several parts under one prefix."""
    found: dict[str, Spec] = {}
    for part in parts:
        found |= part.state(at, n_ctx)
    return found
