"""The parts of RWKV 7 (arXiv:2503.14456): a time mix, linear attention with the generalised delta
rule, and a channel mix, a feed-forward part that also reads the token before."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Shape, Tensor, leaf
from pyggml.models.config import Reader
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.recurrent import initial, keep_state
from pyggml.models.weights import Tensors, TensorSpec, matrix, merge_tensors
from pyggml.ops import (
    add,
    exp,
    l2_norm,
    mul,
    mul_mat,
    narrow,
    neg,
    norm,
    relu,
    reshape,
    rwkv_wkv7,
    scale,
    sigmoid,
    sqr,
    ssm_conv,
    sub,
    sum_rows,
    tanh,
)

_LERPS = "rwkvag"  # the order of the rows of time_mix_lerp_fused
GROUP_EPS = 64e-5  # of the norm over each head
_LOG_FASTEST = -0.606531  # decay = e^(-0.606531 · sigmoid(·)), 0.545 to 1


def change(net: Net, name: str, x: Tensor) -> Tensor:
    """x_{t-1} − x_t, (T, n): a convolution with taps 1 and −1."""
    n = x.shape[1]
    taps = net.once(
        ("change", n), lambda: leaf(np.tile(np.array([1, -1], np.float32), (n, 1)), "1, -1")
    )
    state = initial(net, name, (1, n))
    return keep_state(net, name, ssm_conv(state, x, taps, net.inputs.positions))


@dataclass(frozen=True, slots=True)
class ChannelMix(Part):
    """value(relu(key(x_t + lerp_k · (x_{t-1} − x_t)))²)."""

    n_embd: int
    n_ff: int

    branch = "ffn_out"

    def tensors(self, at: str) -> Tensors:
        return merge_tensors(
            [
                {f"{at}channel_mix_lerp_k.weight": TensorSpec((self.n_embd,))},
                matrix(f"{at}channel_mix_key", self.n_ff, self.n_embd, bias=False),
                matrix(f"{at}channel_mix_value", self.n_embd, self.n_ff, bias=False),
            ]
        )

    def state(self, at: str) -> Mapping[str, Spec]:
        return {f"{at}channel_shift": Spec((1, self.n_embd))}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        before = change(net, f"{at}channel_shift", x)
        return self.value(net, at, self.shift_mix(net, at, x, before, "k"))

    def shift_mix(self, net: Net, at: str, x: Tensor, before: Tensor, letter: str) -> Tensor:
        """x_t + lerp · (x_{t-1} − x_t)."""
        return add(x, mul(before, net.weights[f"{at}channel_mix_lerp_{letter}.weight"]))

    def value(self, net: Net, at: str, x: Tensor) -> Tensor:
        """value(relu(key(x))²)."""
        k = net.tap(f"{at}ffn_neurons", sqr(relu(net.linear(f"{at}channel_mix_key", x))))
        return net.linear(f"{at}channel_mix_value", k)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeMix(Part):
    """RWKV 7's time mix. Letters as in the paper; pairs of low-rank matrices make four vectors:
    w the decay, a the in-context learning rate, v the share of block 0's values, g the gate.

    ranks   letter -> rank of its matrices; without g there is no gate
    first   block 0. It has no share v, though a file may hold v's matrices
    normed  whether there is a norm over each head of what the heads give
    """

    n_embd: int
    size: int
    ranks: Mapping[str, int]
    first: bool
    normed: bool = True

    def tensors(self, at: str) -> Tensors:
        n, tensors = self.n_embd, dict[str, TensorSpec]()
        tensors[f"{at}time_mix_lerp_fused.weight"] = TensorSpec(
            (len(self.ranks) + 2, 1, 1, n), unpacked=True
        )
        for letter, rank in self.ranks.items():
            unused = self.first and letter == "v"
            rank = self.ranks["a"] if unused else rank
            if letter != "g":
                tensors[f"{at}time_mix_{letter}0.weight"] = TensorSpec((n,), optional=unused)
            tensors[f"{at}time_mix_{letter}1.weight"] = TensorSpec((rank, n), optional=unused)
            tensors[f"{at}time_mix_{letter}2.weight"] = TensorSpec((n, rank), optional=unused)
        norm = ("ln.weight", "ln.bias") if self.normed else ()
        vectors = ("k_k.weight", "k_a.weight", "r_k.weight", *norm)
        return merge_tensors(
            [
                *(matrix(f"{at}time_mix_{m}", n, n, bias=False) for m in ("receptance", "key")),
                *(matrix(f"{at}time_mix_{m}", n, n, bias=False) for m in ("value", "output")),
                {f"{at}time_mix_{name}": TensorSpec((n,)) for name in vectors},
                tensors,
            ]
        )

    def state(self, at: str) -> Mapping[str, Spec]:
        return {f"{at}time_shift": Spec((1, self.n_embd)), f"{at}wkv_state": Spec(self._state)}

    @property
    def _state(self) -> Shape:
        return self.n_embd // self.size, self.size, self.size

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        to = self._interpolate(net, at, x)
        r = self._heads(net.linear(f"{at}time_mix_receptance", to["r"]))
        k, v = net.linear(f"{at}time_mix_key", to["k"]), self._value(net, at, to["v"])
        w = exp(scale(sigmoid(self._low_rank(net, at, "w", to["w"])), _LOG_FASTEST))
        a = sigmoid(self._low_rank(net, at, "a", to["a"]))
        unit = net.in_turn(l2_norm(self._heads(mul(k, self._weight(net, at, "k_k"))), 1e-12))
        part = mul(k, self._weight(net, at, "k_a"))
        k = self._heads(add(k, sub(mul(a, part), part)))
        v, a, w = self._heads(v), self._heads(a), self._heads(w)
        state = initial(net, f"{at}wkv_state", self._state)
        y = rwkv_wkv7(state, r, w, k, v, neg(unit), mul(unit, a), net.inputs.positions)
        y = keep_state(net, f"{at}wkv_state", y.named(f"{at}wkv"))
        y = self._normalise(net, at, y) if self.normed else reshape(y, x.shape)
        own = reshape(self._weight(net, at, "r_k"), self._state[:2])
        y = add(y, reshape(mul(v, sum_rows(mul(mul(k, r), own))), x.shape))
        y = mul(y, self._low_rank(net, at, "g", to["g"])) if "g" in self.ranks else y
        return net.linear(f"{at}time_mix_output", y)

    def _interpolate(self, net: Net, at: str, x: Tensor) -> dict[str, Tensor]:
        """x_t + lerp · (x_{t-1} − x_t), with a lerp (n_embd,) for each of _LERPS."""
        before, lerp = change(net, f"{at}time_shift", x), self._weight(net, at, "lerp_fused")
        shares = (reshape(narrow(lerp, 0, i, 1), (self.n_embd,)) for i in range(lerp.shape[0]))
        moved = (net.in_turn(add(x, mul(before, share))) for share in shares)
        return dict(zip(_LERPS, moved, strict=False))

    def _value(self, net: Net, at: str, x: Tensor) -> Tensor:
        v = net.linear(f"{at}time_mix_value", x)
        first = net.once("first values", lambda: v)
        if self.first:
            return first
        share = sigmoid(self._low_rank(net, at, "v", x))
        return add(v, mul(sub(first, v), share))

    def _low_rank(self, net: Net, at: str, letter: str, x: Tensor) -> Tensor:
        """W2 · f(W1 x) + w0 of one letter; f is tanh for w, sigmoid for g; g has no w0. Adapters
        do not update these matrices, as in llama.cpp."""
        inner = mul_mat(self._weight(net, at, f"{letter}1"), x)
        inner = tanh(inner) if letter == "w" else sigmoid(inner) if letter == "g" else inner
        y = mul_mat(self._weight(net, at, f"{letter}2"), inner)
        return y if letter == "g" else add(y, self._weight(net, at, f"{letter}0"))

    def _normalise(self, net: Net, at: str, y: Tensor) -> Tensor:
        """A layer norm over each head, (T, heads, size) -> (T, n_embd)."""
        y = reshape(norm(y, GROUP_EPS), (y.shape[0], self.n_embd))
        bias = net.weights[f"{at}time_mix_ln.bias"]
        return add(mul(y, self._weight(net, at, "ln")), bias)

    def _weight(self, net: Net, at: str, name: str) -> Tensor:
        return net.weights[f"{at}time_mix_{name}.weight"]

    def _heads(self, x: Tensor) -> Tensor:
        return reshape(x, (x.shape[0], -1, self.size))


def read_head_size(r: Reader, n_embd: int) -> int:
    """The numbers of a head of a time mix."""
    size = r.count("wkv.head_size", most=1 << 12)
    if n_embd % size:
        r.faults.append(f"wkv.head_size is {size}, wanted one that divides {n_embd}")
        return 1
    return size


def read_ranks(r: Reader, gated: bool) -> dict[str, int]:
    """The ranks of a TimeMix; gated: the file must have that of the gate."""
    keys = {"w": "decay", "a": "iclr", "v": "value_residual_mix"}
    ranks = {x: r.count(f"attention.{key}_lora_rank", most=1 << 16) for x, key in keys.items()}
    default, least = (None, 1) if gated else (0, 0)
    gate = r.count("attention.gate_lora_rank", default, least=least, most=1 << 16)
    return ranks | ({"g": gate} if gate else {})
