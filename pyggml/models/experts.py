"""Mixtures of experts: a router chooses a few of many feed-forward networks for each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.balance import Routing
from pyggml.models.basics import Basics
from pyggml.models.block import Sum
from pyggml.models.config import Reader
from pyggml.models.feed_forward import GatedFeedForward, Unit
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
    repeat,
    repeat_back,
    reshape,
    scale,
    sigmoid,
    soft_max,
    softplus,
    sqrt,
    sum_rows,
    swiglu,
    top_k,
)

MOST_EXPERTS = 512  # llama.cpp's LLAMA_MAX_EXPERTS
# Keys of small models: of any mixture, and of one with a shared expert behind dense layers.
MIXTURE: dict[str, object] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
}
EXAMPLE: dict[str, object] = {
    **MIXTURE,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
LEAST_SUM = 6.103515625e-5  # llama.cpp's guard of the division: float16's smallest normal number


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Part):
    """Σ_e w[e] · ffn_down_exps[e](unit(ffn_gate_exps[e] x, ffn_up_exps[e] x)), e: chosen experts.

    unit        swiglu, geglu, ...
    fused       one matrix for each expert, ffn_gate_up_exps: the rows of the gate, then those of up
    bias        the router and the experts' matrices have biases
    gating      logits of the router (T, n_expert) -> weights w of the experts
    biased      experts are chosen by w + exp_probs_b instead of w; None: if the file has it
    bare        exp_probs_b is named without ".bias"
    chosen_by   experts are chosen by this function of the router's logits; None: by w
    groups      experts lie in so many groups; those of the n_groups_used best are eligible. A group
                is as good as the sum of its two best experts
    normalised  the w of a token's chosen experts are divided by their sum
    factor      factor of w, applied last
    gated       whether there is ffn_gate_exps; else the unit has ffn_up_exps x alone
    first       w multiplies x, before all products, instead of what the unit gives
    suffix      end of the matrices' names
    """

    n_embd: int
    n_ff: int
    n_expert: int
    n_used: int
    unit: Callable[..., Tensor]
    fused: bool = False
    bias: bool = False
    gated: bool = True
    gating: Callable[[Tensor], Tensor] = soft_max
    biased: bool | None = False
    bare: bool = False
    chosen_by: Callable[[Tensor], Tensor] | None = None
    groups: int = 1
    n_groups_used: int = 1
    normalised: bool = True
    factor: float = 1.0
    first: bool = False
    suffix: str = "_exps"

    branch = "ffn_out"

    @property
    def _ups(self) -> tuple[str, ...]:
        return ("gate", "up") if self.gated else ("up",)

    def _chooser(self, at: str) -> str:
        return f"{at}exp_probs_b" + ("" if self.bare else ".bias")

    def tensors(self, at: str) -> Tensors:
        n, inner, outer = self.n_expert, self.n_ff, self.n_embd
        chooser = TensorSpec((n,), optional=self.biased is None)
        ups = {"gate_up": 2 * inner} if self.fused else dict.fromkeys(self._ups, inner)
        return merge_tensors(
            [
                matrix(f"{at}ffn_gate_inp", n, outer, bias=self.bias, usual=False),
                {} if self.biased is False else {self._chooser(at): chooser},
                *(
                    matrices(f"{at}ffn_{x}{self.suffix}", n, rows, outer, self.bias)
                    for x, rows in ups.items()
                ),
                matrices(f"{at}ffn_down{self.suffix}", n, outer, inner, self.bias),
            ]
        )

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        """w multiplies the input of ffn_down_exps, whose rows are shorter than the output's.
        With biases it multiplies the output, as the biases are weighted too."""
        return self.mix(net, at, x, x)

    def mix(self, net: Net, at: str, x: Tensor, routed: Tensor) -> Tensor:
        """The experts of x (T, n_embd), chosen by what the router makes of `routed` (T, n_embd)."""
        n_tokens, n_embd = x.shape
        chosen, weights = self.route(net, at, routed)
        rows = reshape(x, (n_tokens, 1, n_embd))
        if self.first:
            rows = mul(repeat(rows, (n_tokens, self.n_used, n_embd)), weights)
        if self.fused:
            both = net.large(net.by_expert(f"{at}ffn_gate_up{self.suffix}", rows, chosen))
            inner = self.unit(*halve(both))
        else:
            ups = (net.by_expert(f"{at}ffn_{x}{self.suffix}", rows, chosen) for x in self._ups)
            inner = self.unit(*map(net.large, ups))
        inner = inner if self.bias or self.first else mul(inner, weights)
        inner = net.tap(f"{at}ffn_neurons{self.suffix}", inner)
        y = net.by_expert(f"{at}ffn_down{self.suffix}", inner, chosen)
        y = mul(y, weights) if self.bias else y
        return reshape(repeat_back(y, (n_tokens, 1, n_embd)), (n_tokens, n_embd))

    def route(self, net: Net, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts (T, n_used) I32 and their weights w (T, n_used, 1)."""
        n_tokens, other = x.shape[0], self.suffix.removeprefix("_exps")  # of experts beside others
        logits = net.linear(f"{at}ffn_gate_inp", x, f"{at}ffn_gate_inp{other}")
        probabilities = self.gating(logits).named(f"{at}router{other}")
        bias = net.weights.get(self._chooser(at))
        scores = self.chosen_by(logits) if self.chosen_by else probabilities
        chosen = self._choose(net, scores if bias is None else add(scores, bias))
        if not other:
            net.routings.append(Routing(logits, chosen))
        weights = get_rows(reshape(probabilities, (*probabilities.shape, 1)), chosen)
        if self.normalised:
            total = repeat_back(weights, (n_tokens, 1, 1))
            weights = div(weights, clamp(total, LEAST_SUM, float("inf")))
        return chosen, weights if self.factor == 1 else scale(weights, self.factor)

    def _choose(self, net: Net, scores: Tensor) -> Tensor:
        """The experts (T, n_used) I32 of the best scores (T, n_expert), of eligible groups."""
        if self.groups == 1:
            return top_k(scores, self.n_used)
        n_tokens, each = scores.shape[0], self.n_expert // self.groups
        by_group = reshape(scores, (n_tokens * self.groups, each))
        best = top_k(by_group, min(2, each))
        worth = get_rows(reshape(by_group, (*by_group.shape, 1)), best)
        worth = reshape(sum_rows(reshape(worth, best.shape)), (n_tokens, self.groups))
        eligible = top_k(worth, self.n_groups_used)
        ids = net.once(("experts of groups", self.groups, each), lambda: _by_group(self))
        ids = reshape(get_rows(ids, eligible), (n_tokens, -1, 1))
        scores = get_rows(reshape(by_group, (n_tokens, self.groups, each)), eligible)
        chosen = top_k(reshape(scores, (n_tokens, -1)), self.n_used)
        return reshape(get_rows(ids, chosen), (n_tokens, self.n_used))


def _by_group(experts: Experts) -> Tensor:
    """The numbers of the experts of each group, I32 (groups, experts of a group)."""
    ids = np.arange(experts.n_expert, dtype=np.int32)
    return leaf(ids.reshape(experts.groups, -1), "experts of groups")


@dataclass(frozen=True, slots=True)
class GatedPart(Part):
    """sigmoid(ffn_gate_inp_shexp · x) · body(x)."""

    body: Part
    n_embd: int

    branch = "ffn_out"

    def tensors(self, at: str) -> Tensors:
        gate = matrix(f"{at}ffn_gate_inp_shexp", 1, self.n_embd, bias=False, usual=False)
        return merge_tensors([gate, self.body.tensors(at)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        gate = sigmoid(net.linear(f"{at}ffn_gate_inp_shexp", x))
        return mul(self.body(net, at, x), gate)


def has_experts(r: Reader) -> bool:
    """Whether the file has an expert_count above 0."""
    return r.count("expert_count", 0, least=0, most=MOST_EXPERTS) > 0


SIGMOID = 2  # llama.cpp's number of this function of a router


def sqrt_softplus(x: Tensor) -> Tensor:
    """√ softplus(x)."""
    return sqrt(softplus(x))


def read_gating(r: Reader, default: int | None = None) -> Callable[[Tensor], Tensor]:
    """The function from a router's logits to weights; its numbers are llama.cpp's, 0 for the
    default. A softmax over the chosen experts alone is one over all of them that is normalised."""
    functions = (soft_max, sigmoid, soft_max, sqrt_softplus)
    least = 0 if default else 1
    kind = r.count("expert_gating_func", default, least=least, most=len(functions)) or default or 1
    return functions[kind - 1]


def read_router(r: Reader, default: int | None = None) -> dict[str, Any]:
    """Fields of Experts whose file says how they are weighed; `default`: see read_gating."""
    of_chosen = r.count("expert_gating_func", default or 1, least=0, most=4) == 3
    return {
        "gating": read_gating(r, default),
        "normalised": r.flag("expert_weights_norm", False) or of_chosen,
        "factor": r.number("expert_weights_scale", 0.0, -1e6, 1e6) or 1.0,
        "biased": None,
    }


def read_shared(
    r: Reader, b: Basics, unit: Callable[[Tensor, Tensor], Tensor], default: int = 0
) -> GatedFeedForward | None:
    """The expert of all tokens, or None if neither the file nor `default` gives its length.

    A length of 0 in the file counts as missing, as in llama.cpp.
    """
    n_ff = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20) or default
    return GatedFeedForward(b.config.n_embd, n_ff, unit, suffix="_shexp") if n_ff else None


_Unit = Callable[..., Tensor]  # of a gate and an up, or of an up alone


def _by_layer(unit: _Unit | Sequence[_Unit], n_layer: int) -> Sequence[_Unit]:
    return unit if isinstance(unit, Sequence) else (unit,) * n_layer


def read_experts(
    r: Reader,
    b: Basics,
    unit: _Unit | Sequence[_Unit],
    own_length: bool = True,
    least: int = 1,
    width: int = 0,
    kind: type[Experts] = Experts,
    **more: Any,
) -> tuple[Experts, ...]:
    """The experts of every layer.

    unit         of every layer, or of each
    own_length   the file may have expert_feed_forward_length; else n_ff is the layer's
    least        0 if the file may say so of layers that have no experts
    width        numbers that go into an expert; 0 for those of the embedding
    more         values of further fields of Experts
    """
    n_layer = b.config.n_layer
    n = r.count("expert_count", most=MOST_EXPERTS)
    used = r.counts("expert_used_count", n_layer, least=least, most=MOST_EXPERTS)
    if max(used) > n:
        r.faults.append(f"{max(used)} of {n} experts cannot be used")
        used = (1,) * n_layer
    n_ff = b.n_ff
    if own_length:
        usual = tuple(max(n // max(k, 1), 1) for n, k in zip(b.n_ff, used, strict=True))
        n_ff = r.counts("expert_feed_forward_length", n_layer, usual, least=least, most=1 << 20)
    fused = (f"blk.{i}.ffn_gate_up_exps.weight" in r.shapes for i in range(n_layer))
    alike: dict[str, Any] = {"n_embd": width or b.config.n_embd, "n_expert": n}
    alike |= _read_groups(r, n) | more
    return tuple(
        kind(n_ff=length, n_used=k, fused=in_one, unit=of_layer, **alike)
        for length, k, in_one, of_layer in zip(
            n_ff, used, fused, _by_layer(unit, n_layer)[:n_layer], strict=True
        )
    )


def _read_groups(r: Reader, n_expert: int) -> dict[str, int]:
    """The groups of experts, 1 for none."""
    groups = r.count("expert_group_count", 0, least=0, most=MOST_EXPERTS) or 1
    if groups == 1:
        return {}
    used = r.count("expert_group_used_count", least=1, most=max(groups - 1, 1))
    if n_expert % groups:
        r.faults.append(f"{n_expert} experts cannot lie in {groups} groups evenly")
        return {}
    return {"groups": groups, "n_groups_used": used}


def read_feed_forward(
    r: Reader,
    b: Basics,
    unit: Unit | Sequence[Unit],
    shared: int | Sequence[int] = 0,
    dense: Callable[[int], bool] | None = None,
    own_units: Sequence[Unit] = (),
    **more: Any,
) -> tuple[Part, ...]:
    """The feed-forward part of every layer: dense in some, experts in others, and beside them an
    expert of all tokens.

    unit     of every layer, or of each
    shared   numbers inside of that expert, of every layer or each; 0 for none
    dense    whether a layer is dense; None: the first leading_dense_block_count are
    others   of each layer, the unit of all but its chosen experts, if it is another
    more     values of further fields of Experts
    """
    n_layer = b.config.n_layer
    units = own_units or _by_layer(unit, n_layer)
    is_dense = dense or _leads(r)
    lengths = (shared,) * n_layer if isinstance(shared, int) else shared

    def mixture(experts: Experts, length: int, unit: Unit) -> Part:
        beside = GatedFeedForward(b.config.n_embd, length, unit, suffix="_shexp")
        return Sum((experts, beside)) if length else experts

    mixtures = map(mixture, read_experts(r, b, unit, **more), lengths, units)
    return tuple(b.gated_mlp(i, units[i]) if is_dense(i) else m for i, m in enumerate(mixtures))


def dense_without_router(r: Reader) -> Callable[[int], bool]:
    """Whether the file has no router for a layer; of a model without a file, the first few."""
    if not r.has_tensors:
        return _leads(r)
    return lambda layer: f"blk.{layer}.ffn_gate_inp.weight" not in r.shapes


def _leads(r: Reader) -> Callable[[int], bool]:
    n_dense = r.count("leading_dense_block_count", 0, least=0, most=1024)
    return lambda layer: layer < n_dense


def read_shared_length(r: Reader, n_ff: int = 0) -> int:
    """The numbers inside of the expert of all tokens: expert_shared_feed_forward_length, or
    expert_shared_count times n_ff."""
    n_shared = r.count("expert_shared_count", 0, least=0, most=MOST_EXPERTS)
    own = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    return own or n_shared * n_ff


def read_counted_length(r: Reader, own: bool = False) -> int:
    """The numbers inside of the expert of all tokens, which counts as expert_shared_count ones: a
    key that the file must have. own: the file may have the length of one."""
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    one = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20) if own else 0
    return (one or n_ff) * r.count("expert_shared_count", least=0, most=64)


def read_dense_first(r: Reader, b: Basics, default: int | None, **more: Any) -> tuple[Part, ...]:
    """The feed-forward part of every layer: the first ones dense, in others experts beside a shared
    one. default: see read_router; more: fields of Experts."""
    n_layer, n_dense = b.config.n_layer, r.count("leading_dense_block_count", 0, least=0, most=1024)
    if n_dense >= n_layer and not has_experts(r):
        return tuple(b.gated_mlp(i, swiglu) for i in range(n_layer))
    router = read_router(r, default) | more
    return read_feed_forward(r, b, swiglu, read_counted_length(r), **router)
