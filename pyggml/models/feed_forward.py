"""Feed-forward parts: n_embd -> n_ff -> n_embd numbers a token."""

from collections.abc import Callable
from dataclasses import dataclass

from pyggml.graph.tensor import Tensor
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, matrix, merge_tensors
from pyggml.ops import halve


@dataclass(frozen=True, slots=True)
class GatedFeedForward(Part):
    """ffn_down(unit(ffn_gate x, ffn_up x)).

    unit     swiglu, geglu, ...
    fused    one matrix, ffn_up, with the rows of the gate, then those of up
    suffix   end of the tensors' names
    """

    n_embd: int
    n_ff: int
    unit: Callable[[Tensor, Tensor], Tensor]
    fused: bool = False
    suffix: str = ""

    @property
    def branch(self) -> str:
        return "ffn_out"

    def tensors(self, at: str) -> Tensors:
        rows = (
            {"ffn_up": 2 * self.n_ff}
            if self.fused
            else dict.fromkeys(("ffn_gate", "ffn_up"), self.n_ff)
        )
        ups = [matrix(f"{at}{name}{self.suffix}", n, self.n_embd) for name, n in rows.items()]
        return merge_tensors([*ups, matrix(f"{at}ffn_down{self.suffix}", self.n_embd, self.n_ff)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = halve(net.large(net.linear(f"{at}ffn_up{self.suffix}", x)))
        else:
            names = (f"{at}ffn_{part}{self.suffix}" for part in ("gate", "up"))
            gate, up = (net.large(net.linear(name, x)) for name in names)
        return net.linear(f"{at}ffn_down{self.suffix}", self.unit(gate, up))


@dataclass(frozen=True, slots=True)
class FeedForward(Part):
    """ffn_down(activation(ffn_up x)); activation is gelu, relu, ..."""

    n_embd: int
    n_ff: int
    activation: Callable[[Tensor], Tensor]

    @property
    def branch(self) -> str:
        return "ffn_out"

    def tensors(self, at: str) -> Tensors:
        up = matrix(f"{at}ffn_up", self.n_ff, self.n_embd)
        return merge_tensors([up, matrix(f"{at}ffn_down", self.n_embd, self.n_ff)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        up = net.large(net.linear(f"{at}ffn_up", x))
        return net.linear(f"{at}ffn_down", self.activation(up))
