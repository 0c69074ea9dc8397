"""How parts are wired around the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyggml.models.net import Net
from pyggml.models.part import Part, states
from pyggml.models.weights import Tensors, merged
from pyggml.op import Spec
from pyggml.ops import add, scale
from pyggml.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Chain(Part):
    """Parts that follow one another; a block of a decoder is one, as a rule."""

    parts: tuple[Part, ...]

    def tensors(self, at: str) -> Tensors:
        return merged(part.tensors(at) for part in self.parts)

    def state(self, at: str, n_ctx: int) -> Mapping[str, Spec]:
        return states(self.parts, at, n_ctx)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(net, at, x)
        return x


@dataclass(frozen=True, slots=True)
class Residual(Part):
    """x + factor · body(x); put norms before and after the body by making it a Chain."""

    body: Part
    factor: float = 1.0

    def tensors(self, at: str) -> Tensors:
        return self.body.tensors(at)

    def state(self, at: str, n_ctx: int) -> Mapping[str, Spec]:
        return self.body.state(at, n_ctx)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        y = self.body(net, at, x)
        return add(x, y if self.factor == 1 else scale(y, self.factor))


@dataclass(frozen=True, slots=True)
class Sum(Part):
    """The sum of what several parts make of the same x; in a Residual, parallel branches."""

    parts: tuple[Part, ...]

    def tensors(self, at: str) -> Tensors:
        return merged(part.tensors(at) for part in self.parts)

    def state(self, at: str, n_ctx: int) -> Mapping[str, Spec]:
        return states(self.parts, at, n_ctx)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        first, *others = self.parts
        y = first(net, at, x)
        for part in others:
            y = add(y, part(net, at, x))
        return y


def residual(*parts: Part, factor: float = 1.0) -> Residual:
    """x + factor · (the last of the parts applied to ... the first applied to x)."""
    return Residual(Chain(parts), factor)
