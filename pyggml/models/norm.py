"""Norms over the last axis."""

from abc import abstractmethod
from dataclasses import dataclass

from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, TensorSpec
from pyggml.ops import add, mul, norm, rms_norm, rms_norm_mul


@dataclass(frozen=True, slots=True)
class Norm(Part):
    """A norm over vectors of `size` numbers. `name` is the tensors' name in the file."""

    name: str
    size: int
    eps: float

    branch = ""

    @abstractmethod
    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        """x (..., size) normalised."""


@dataclass(frozen=True, slots=True)
class RmsNorm(Norm):
    """x / √(mean x² + eps) · weight + bias.

    has     its tensors: "weight", "weight" and "bias", or neither
    bare    the weight's name has no ending
    heads   with x (..., heads, size), the weight's shape; (): it is (size,)
    """

    has: tuple[str, ...] = ("weight",)
    bare: bool = False
    heads: Shape = ()

    def tensors(self, at: str) -> Tensors:
        spec = TensorSpec(self.heads or (self.size,), unpacked=bool(self.heads))
        return {self._name(at, part): spec for part in self.has}

    def _name(self, at: str, part: str) -> str:
        return f"{at}{self.name}" if self.bare else f"{at}{self.name}.{part}"

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        name = f"{at}{self.name}"
        if "weight" not in self.has:
            y = rms_norm(x, self.eps)
        elif self.heads:
            y = mul(rms_norm(x, self.eps), net.weights[self._name(at, "weight")])
        else:
            y = rms_norm_mul(x, net.weights[self._name(at, "weight")], self.eps)
        y = add(y, net.weights[f"{name}.bias"]) if "bias" in self.has else y
        return net.tap(name, y.named(name))


@dataclass(frozen=True, slots=True)
class LayerNorm(Norm):
    """(x − mean x) / √(variance + eps) · weight + bias.

    has     its tensors: "weight", "bias", both or neither
    heads   with x (..., heads, size), weight and bias are (heads, size); 0: (size,)
    """

    has: tuple[str, ...] = ("weight", "bias")
    heads: int = 0

    def tensors(self, at: str) -> Tensors:
        shape = (self.heads, self.size) if self.heads else (self.size,)
        spec = TensorSpec(shape, unpacked=True)
        return {f"{at}{self.name}.{part}": spec for part in self.has}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        name = f"{at}{self.name}"
        y = norm(x, self.eps)
        weight, bias = (net.weights.get(f"{name}.{part}") for part in ("weight", "bias"))
        y = y if weight is None else mul(y, weight)
        y = y if bias is None else add(y, bias)
        return net.tap(name, y.named(name))
