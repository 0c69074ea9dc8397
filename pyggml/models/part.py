"""The base class of a decoder's parts: attention, feed-forward, norms, blocks.

A part holds hyperparameters and other parts, but no data. It lists the tensors it needs, lists the
state it keeps in a cache, and adds its ops to a graph.

`at` is the prefix of the part's tensor names: "blk.3." in block 3, "" outside of the blocks. One
part may serve many prefixes: the blocks of a model often share one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Tensor
from pyggml.models.net import Net
from pyggml.models.weights import Tensors, merge_tensors


class Part(ABC):
    """One piece of a decoder."""

    __slots__ = ()

    @property
    def branch(self) -> str:
        """The name of what a residual branch with this part adds; "" where others name it."""
        return "attn_out"

    def tensors(self, at: str) -> Tensors:
        """The tensors that this part needs under a prefix, in order of use: those of the parts that
        it is made of."""
        return merge_tensors(part.tensors(at) for part in self.inner)

    @abstractmethod
    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        """The part's output for x (T, n_embd)."""

    @property
    def inner(self) -> tuple[Part, ...]:
        """The parts that it is made of, with the same prefix: those that its fields hold."""
        of_part = fields(self)  # type: ignore[arg-type]  # each part is a dataclass
        held = (getattr(self, field.name) for field in of_part)
        every = (part for one in held for part in (one if isinstance(one, tuple) else (one,)))
        return tuple(part for part in every if isinstance(part, Part))

    def rows(self, at: str) -> Mapping[str, tuple[int, int]]:
        """What a cache keeps of each token: name in Cache.rows -> heads, numbers of a head."""
        return dict(row for part in self.inner for row in part.rows(at).items())

    def shift(self, net: Net, at: str) -> tuple[Tensor, ...]:
        """What moves its rows in the cache: see pyggml.models.shift."""
        return tuple(moved for part in self.inner for moved in part.shift(net, at))

    def state(self, at: str) -> Mapping[str, Spec]:
        """What it keeps of all earlier tokens together: name in Cache.state -> shape and type."""
        return dict(one for part in self.inner for one in part.state(at).items())
