"""Parts that combine other parts: chains, residual branches and sums."""

from dataclasses import dataclass

from pyggml.graph.tensor import Tensor
from pyggml.models.net import Net
from pyggml.models.norm import Norm
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, TensorSpec
from pyggml.ops import add, mul, scale


@dataclass(frozen=True, slots=True)
class Chain(Part):
    """Parts in sequence, each with the output of the one before. Most blocks are chains."""

    parts: tuple[Part, ...]

    @property
    def branch(self) -> str:
        named = [part for part in self.parts if not isinstance(part, Norm)]
        return named[-1].branch if named else ""

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(net, at, x)
        return x


@dataclass(frozen=True, slots=True)
class Residual(Part):
    """x + factor · body(x). A body with norms is a Chain."""

    body: Part
    factor: float = 1.0

    branch = ""  # its output is none

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        y = self.body(net, at, x)
        y = y if self.factor == 1 else scale(y, self.factor)
        x = add(x, named_branch(net, at, self.body, y))
        return net.tap(f"{at}mid", x) if self.body.branch == "attn_out" else x


@dataclass(frozen=True, slots=True)
class Scaled(Part):
    """factor · body(x)."""

    body: Part
    factor: float

    @property
    def branch(self) -> str:
        return self.body.branch

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        return scale(self.body(net, at, x), self.factor)


@dataclass(frozen=True, slots=True)
class Sum(Part):
    """Σ part(x): the outputs of several parts for one x. In a Residual: parallel branches."""

    parts: tuple[Part, ...]

    @property
    def branch(self) -> str:
        """Of experts beside a shared one, theirs; "" for attention beside a feed-forward part."""
        first, *rest = dict.fromkeys(part.branch for part in self.parts)
        return "" if rest else first

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        first, *rest = self.parts
        y = self._name_result(net, at, first, x)
        for part in rest:
            y = add(y, self._name_result(net, at, part, x))
        return y

    def _name_result(self, net: Net, at: str, part: Part, x: Tensor) -> Tensor:
        y = part(net, at, x)
        return y if self.branch else named_branch(net, at, part, y)


@dataclass(frozen=True, slots=True)
class OutputScale(Part):
    """x · layer_output_scale, a number that a layer has learned; x if the file has none."""

    name = "layer_output_scale.weight"

    branch = ""

    def tensors(self, at: str) -> Tensors:
        return {f"{at}{self.name}": TensorSpec((1,), optional=True)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        factor = net.weights.get(f"{at}{self.name}")
        return x if factor is None else mul(x, factor)


def named_branch(net: Net, at: str, part: Part, y: Tensor) -> Tensor:
    """y, which a part adds to the residual stream, under the part's name for it."""
    return net.tap(f"{at}{part.branch}", y) if part.branch else y


def residual(*parts: Part, factor: float = 1.0) -> Residual:
    """x + factor · part_n(… part_2(part_1(x)))."""
    return Residual(Chain(parts), factor)
