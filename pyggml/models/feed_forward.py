"""Feed-forward parts: n_embd -> n_ff -> n_embd numbers a token."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from pyggml.graph.tensor import Tensor
from pyggml.models.config import Reader
from pyggml.models.net import Net
from pyggml.models.norm import Norm
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, matrix, merge_tensors
from pyggml.ops import clamp, halve, mul, silu, swiglu, swiglu_clamp


def clipped_swiglu(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    """silu(min(gate, limit)) · clip(up, ±limit), or swiglu where limit is 0."""
    return partial(swiglu_clamp, limit=limit) if limit > 1e-6 else swiglu


def clipped_silu(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    """min(silu(gate), limit) · clip(up, ±limit), or swiglu where limit is 0."""
    if limit <= 1e-6:
        return swiglu
    return lambda gate, up: mul(clamp(silu(gate), -inf, limit), clamp(up, -limit, limit))


Unit = Callable[[Tensor, Tensor], Tensor]


def read_clips(r: Reader, n: int) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """The units of experts and of others, for each of n layers, clipped where the file says so."""
    limits = (r.numbers(f"swiglu_clamp_{x}", n, 0.0, 0.0, 1e6) for x in ("exp", "shexp"))
    of_experts, of_others = (tuple(map(clipped_silu, of)) for of in limits)
    return of_experts, of_others


@dataclass(frozen=True, slots=True)
class GatedFeedForward(Part):
    """ffn_down(unit(ffn_gate x, ffn_up x)).

    unit     swiglu, geglu, ...
    fused    one matrix, ffn_up, with the rows of the gate, then those of up
    suffix   end of the tensors' names
    norm     norm of what ffn_down multiplies
    """

    n_embd: int
    n_ff: int
    unit: Callable[[Tensor, Tensor], Tensor]
    fused: bool = False
    suffix: str = ""
    norm: Norm | None = None

    branch = "ffn_out"

    def tensors(self, at: str) -> Tensors:
        rows = (
            {"ffn_up": 2 * self.n_ff}
            if self.fused
            else dict.fromkeys(("ffn_gate", "ffn_up"), self.n_ff)
        )
        ups = [matrix(f"{at}{name}{self.suffix}", n, self.n_embd) for name, n in rows.items()]
        ups += [self.norm.tensors(at)] if self.norm else []
        return merge_tensors([*ups, matrix(f"{at}ffn_down{self.suffix}", self.n_embd, self.n_ff)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = halve(net.large(net.linear(f"{at}ffn_up{self.suffix}", x)))
        else:
            names = (f"{at}ffn_{part}{self.suffix}" for part in ("gate", "up"))
            gate, up = (net.large(net.linear(name, x)) for name in names)
        inner = self.unit(gate, up)
        inner = self.norm(net, at, inner) if self.norm else inner
        inner = net.tap(f"{at}ffn_neurons{self.suffix}", inner)
        return net.linear(f"{at}ffn_down{self.suffix}", inner)


@dataclass(frozen=True, slots=True)
class FeedForward(Part):
    """ffn_down(activation(ffn_up x)); activation is gelu, relu, ...

    suffix   end of the tensors' names
    """

    n_embd: int
    n_ff: int
    activation: Callable[[Tensor], Tensor]
    suffix: str = ""

    branch = "ffn_out"

    def tensors(self, at: str) -> Tensors:
        up = matrix(f"{at}ffn_up{self.suffix}", self.n_ff, self.n_embd)
        down = matrix(f"{at}ffn_down{self.suffix}", self.n_embd, self.n_ff)
        return merge_tensors([up, down])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        up = net.large(net.linear(f"{at}ffn_up{self.suffix}", x))
        inner = net.tap(f"{at}ffn_neurons{self.suffix}", self.activation(up))
        return net.linear(f"{at}ffn_down{self.suffix}", inner)
