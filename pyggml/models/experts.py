"""Mixtures of experts: a router chooses a few of many feed-forward networks for each token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyggml.graph.tensor import Tensor
from pyggml.models.basics import Basics
from pyggml.models.config import Reader
from pyggml.models.feed_forward import GatedFeedForward
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, TensorSpec, matrices, matrix, merge_tensors
from pyggml.ops import (
    add,
    clamp,
    div,
    get_rows,
    halve,
    mul,
    repeat_back,
    reshape,
    scale,
    sigmoid,
    soft_max,
    top_k,
)

MOST_EXPERTS = 512  # llama.cpp's LLAMA_MAX_EXPERTS
LEAST_SUM = 6.103515625e-5  # llama.cpp's guard of the division: float16's smallest normal number


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Part):
    """Σ_e w[e] · ffn_down_exps[e](unit(ffn_gate_exps[e] x, ffn_up_exps[e] x)), e: chosen experts.

    unit        swiglu, geglu, ...
    fused       one matrix for each expert, ffn_gate_up_exps: the rows of the gate, then those of up
    bias        the router and the experts' matrices have biases
    gating      logits of the router (T, n_expert) -> weights w of the experts
    biased      experts are chosen by w + exp_probs_b instead of w
    normalised  the w of a token's chosen experts are divided by their sum
    factor      factor of w, applied last
    """

    n_embd: int
    n_ff: int
    n_expert: int
    n_used: int
    unit: Callable[[Tensor, Tensor], Tensor]
    fused: bool = False
    bias: bool = False
    gating: Callable[[Tensor], Tensor] = soft_max
    biased: bool = False
    normalised: bool = True
    factor: float = 1.0

    @property
    def branch(self) -> str:
        return "ffn_out"

    def tensors(self, at: str) -> Tensors:
        n, inner, outer = self.n_expert, self.n_ff, self.n_embd
        chooser = {f"{at}exp_probs_b.bias": TensorSpec((n,))} if self.biased else {}
        ups = {"gate_up": 2 * inner} if self.fused else {"gate": inner, "up": inner}
        return merge_tensors(
            [
                matrix(f"{at}ffn_gate_inp", n, outer, bias=self.bias, usual=False),
                chooser,
                *(
                    matrices(f"{at}ffn_{x}_exps", n, rows, outer, self.bias)
                    for x, rows in ups.items()
                ),
                matrices(f"{at}ffn_down_exps", n, outer, inner, self.bias),
            ]
        )

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        """w multiplies the input of ffn_down_exps, whose rows are shorter than the output's.
        With biases it multiplies the output, as the biases are weighted too."""
        n_tokens, n_embd = x.shape
        chosen, weights = self.route(net, at, x)
        rows = reshape(x, (n_tokens, 1, n_embd))
        if self.fused:
            gate, up = halve(net.large(net.by_expert(f"{at}ffn_gate_up_exps", rows, chosen)))
        else:
            names = (f"{at}ffn_{part}_exps" for part in ("gate", "up"))
            gate, up = (net.large(net.by_expert(name, rows, chosen)) for name in names)
        inner = self.unit(gate, up)
        inner = inner if self.bias else mul(inner, weights)
        y = net.by_expert(f"{at}ffn_down_exps", inner, chosen)
        y = mul(y, weights) if self.bias else y
        return reshape(repeat_back(y, (n_tokens, 1, n_embd)), (n_tokens, n_embd))

    def route(self, net: Net, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts (T, n_used) I32 and their weights w (T, n_used, 1)."""
        n_tokens = x.shape[0]
        probabilities = self.gating(net.linear(f"{at}ffn_gate_inp", x)).named(f"{at}router")
        scores = probabilities
        if self.biased:
            scores = add(scores, net.weights[f"{at}exp_probs_b.bias"])
        chosen = top_k(scores, self.n_used)
        weights = get_rows(reshape(probabilities, (n_tokens, self.n_expert, 1)), chosen)
        if self.normalised:
            total = repeat_back(weights, (n_tokens, 1, 1))
            weights = div(weights, clamp(total, LEAST_SUM, float("inf")))
        return chosen, weights if self.factor == 1 else scale(weights, self.factor)


@dataclass(frozen=True, slots=True)
class GatedPart(Part):
    """sigmoid(ffn_gate_inp_shexp · x) · body(x)."""

    body: Part
    n_embd: int

    @property
    def branch(self) -> str:
        return "ffn_out"

    def tensors(self, at: str) -> Tensors:
        gate = matrix(f"{at}ffn_gate_inp_shexp", 1, self.n_embd, bias=False, usual=False)
        return merge_tensors([gate, self.body.tensors(at)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        gate = sigmoid(net.linear(f"{at}ffn_gate_inp_shexp", x))
        return mul(self.body(net, at, x), gate)


def has_experts(r: Reader) -> bool:
    """Whether the file has an expert_count above 0."""
    return r.count("expert_count", 0, least=0, most=MOST_EXPERTS) > 0


def read_gating(r: Reader) -> Callable[[Tensor], Tensor]:
    """The function from a router's logits to weights; its numbers are llama.cpp's."""
    known = (soft_max, sigmoid)
    return known[r.count("expert_gating_func", most=len(known)) - 1]


def read_shared(
    r: Reader, b: Basics, unit: Callable[[Tensor, Tensor], Tensor], default: int = 0
) -> GatedFeedForward | None:
    """The expert of all tokens, or None if neither the file nor `default` gives its length.

    A length of 0 in the file counts as missing, as in llama.cpp.
    """
    n_ff = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20) or default
    return GatedFeedForward(b.config.n_embd, n_ff, unit, suffix="_shexp") if n_ff else None


def read_experts(
    r: Reader,
    b: Basics,
    unit: Callable[[Tensor, Tensor], Tensor],
    own_length: bool = True,
    **more: Any,
) -> tuple[Experts, ...]:
    """The experts of every layer.

    own_length   the file may have expert_feed_forward_length; else n_ff is the layer's
    more         values of further fields of Experts
    """
    n_layer = b.config.n_layer
    n = r.count("expert_count", most=MOST_EXPERTS)
    used = r.counts("expert_used_count", n_layer, most=MOST_EXPERTS)
    if max(used) > n:
        r.faults.append(f"{max(used)} of {n} experts cannot be used")
        used = (1,) * n_layer
    n_ff = b.n_ff
    if own_length:
        usual = tuple(max(n // k, 1) for n, k in zip(b.n_ff, used, strict=True))
        n_ff = r.counts("expert_feed_forward_length", n_layer, usual, most=1 << 20)
    fused = (f"blk.{i}.ffn_gate_up_exps.weight" in r.shapes for i in range(n_layer))
    return tuple(
        Experts(
            n_embd=b.config.n_embd,
            n_ff=length,
            n_expert=n,
            n_used=k,
            unit=unit,
            fused=in_one,
            **more,
        )
        for length, k, in_one in zip(n_ff, used, fused, strict=True)
    )
