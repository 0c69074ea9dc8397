"""Parts that combine other parts: chains, residual branches and sums."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, merged
from pyggml.ops import add, scale
from pyggml.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Chain(Part):
    """Parts in sequence, each with the output of the one before. Most blocks are chains."""

    parts: tuple[Part, ...]

    def tensors(self, at: str) -> Tensors:
        return merged(part.tensors(at) for part in self.parts)

    @property
    def inner(self) -> tuple[Part, ...]:
        return self.parts

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(net, at, x)
        return x


@dataclass(frozen=True, slots=True)
class Residual(Part):
    """x + factor · body(x). A body with norms is a Chain."""

    body: Part
    factor: float = 1.0

    def tensors(self, at: str) -> Tensors:
        return self.body.tensors(at)

    @property
    def inner(self) -> tuple[Part, ...]:
        return (self.body,)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        y = self.body(net, at, x)
        return add(x, y if self.factor == 1 else scale(y, self.factor))


@dataclass(frozen=True, slots=True)
class Sum(Part):
    """Σ part(x): the outputs of several parts for one x. In a Residual: parallel branches."""

    parts: tuple[Part, ...]

    def tensors(self, at: str) -> Tensors:
        return merged(part.tensors(at) for part in self.parts)

    @property
    def inner(self) -> tuple[Part, ...]:
        return self.parts

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        first, *others = self.parts
        y = first(net, at, x)
        for part in others:
            y = add(y, part(net, at, x))
        return y


def residual(*parts: Part, factor: float = 1.0) -> Residual:
    """x + factor · part_n(… part_2(part_1(x)))."""
    return Residual(Chain(parts), factor)
