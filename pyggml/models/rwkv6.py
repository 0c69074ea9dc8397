"""The parts of RWKV 6 (arXiv:2404.05892): a time mix, whose decays and interpolations depend on the
token, and a channel mix. RWKV6Qwen2 has the time mix with grouped keys and values and another
op."""

from collections.abc import Mapping
from dataclasses import dataclass

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.recurrent import initial, keep_state
from pyggml.models.rwkv7 import GROUP_EPS, ChannelMix, change
from pyggml.models.weights import Tensors, TensorSpec, matrix, merge_tensors
from pyggml.ops import (
    add,
    exp,
    gated_linear_attn,
    mul,
    mul_mat,
    narrow,
    neg,
    norm,
    repeat,
    reshape,
    rwkv_wkv6,
    sigmoid,
    silu,
    split,
    sub,
    tanh,
)

LETTERS = "wkvrg"  # the order of the rows of time_mix_lerp_fused, of time_mix_w1 and time_mix_w2


@dataclass(frozen=True, slots=True)
class GatedChannelMix(ChannelMix):
    """sigmoid(receptance(x_r)) · value(relu(key(x_k))²), x_i = x_t + lerp_i · (x_{t-1} − x_t)."""

    def tensors(self, at: str) -> Tensors:
        lerp = {f"{at}channel_mix_lerp_r.weight": TensorSpec((self.n_embd,))}
        gate = matrix(f"{at}channel_mix_receptance", self.n_embd, self.n_embd, bias=False)
        return merge_tensors([lerp, ChannelMix.tensors(self, at), gate])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        before = change(net, f"{at}channel_shift", x)
        to_key, to_gate = (net.in_turn(self.shift_mix(net, at, x, before, lerp)) for lerp in "kr")
        gate = sigmoid(net.linear(f"{at}channel_mix_receptance", to_gate))
        return mul(gate, self.value(net, at, to_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDependentTimeMix(Part):
    """output(gate(x_g) · norm(wkv(receptance(x_r), key(x_k), value(x_v), decay(x_w)))).

    x_i = x_t + (lerp_i + W2_i tanh(W1_i x')) · (x_{t-1} − x_t) with x' = x_t + lerp_x · (…), and
    the decay is e^(−e^(W2 tanh(W1 x_w) + w0)).

    n_kv         heads of keys and values
    extra        rank of the interpolations
    decay_rank   rank of the decay
    fused        the interpolations' vectors are one tensor
    linear       RWKV6Qwen2's: gated linear attention, keys times 1 − decay, no norm, and biases
    """

    n_embd: int
    size: int
    n_kv: int
    extra: int
    decay_rank: int
    fused: bool
    linear: bool

    def tensors(self, at: str) -> Tensors:
        n, n_kv = self.n_embd, self.n_kv * self.size
        rows = {"receptance": n, "key": n_kv, "value": n_kv}
        bias = None if self.linear else False
        vectors = dict.fromkeys(("lerp_x.weight", "decay.weight"), TensorSpec((n,)))
        lerps = {f"lerp_{x}.weight": TensorSpec((n,)) for x in LETTERS}
        one = {"lerp_fused.weight": TensorSpec((5, 1, 1, n), unpacked=True)}
        vectors |= one if self.fused else lerps
        if not self.linear:
            vectors["first.weight"] = TensorSpec((n // self.size, self.size), unpacked=True)
            vectors |= dict.fromkeys(("ln.weight", "ln.bias"), TensorSpec((n,)))
        small = {
            "w1.weight": TensorSpec((5 * self.extra, n)),
            "w2.weight": TensorSpec((5, n, self.extra), unpacked=True),
            "decay_w1.weight": TensorSpec((self.decay_rank, n)),
            "decay_w2.weight": TensorSpec((n, self.decay_rank)),
        }
        return merge_tensors(
            [
                *(matrix(f"{at}time_mix_{x}", m, n, bias) for x, m in rows.items()),
                *(matrix(f"{at}time_mix_{x}", n, n, bias=False) for x in ("gate", "output")),
                {f"{at}time_mix_{x}": spec for x, spec in (vectors | small).items()},
            ]
        )

    @property
    def _state(self) -> Shape:
        return self.n_embd // self.size, self.size, self.size

    def state(self, at: str) -> Mapping[str, Spec]:
        return {f"{at}time_shift": Spec((1, self.n_embd)), f"{at}wkv_state": Spec(self._state)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        to = self._interpolate(net, at, x)
        r = reshape(net.linear(f"{at}time_mix_receptance", to["r"]), (-1, *self._state[:2]))
        k, v = (
            self._of_all_heads(net.linear(f"{at}time_mix_{name}", to[name[0]]))
            for name in ("key", "value")
        )
        gate = net.linear(f"{at}time_mix_gate", to["g"])
        y = self._attend(net, at, r, k, v, self._decay(net, at, to["w"]))
        y = mul(y, sigmoid(gate) if self.linear else silu(gate))
        return net.linear(f"{at}time_mix_output", y)

    def _attend(self, net: Net, at: str, r: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """(T, n_embd) of r, k, v and the decay w, each (T, heads, size)."""
        state, at_token = initial(net, f"{at}wkv_state", self._state), net.inputs.positions
        if self.linear:
            k = sub(k, mul(k, w))
            y = gated_linear_attn(state, k, v, r, w, at_token, self.size**-0.5)
        else:
            y = rwkv_wkv6(state, k, v, r, self._weight(net, at, "first"), w, at_token)
        y = keep_state(net, f"{at}wkv_state", y.named(f"{at}wkv"))
        if self.linear:
            return reshape(y, (-1, self.n_embd))
        y = reshape(norm(y, GROUP_EPS), (-1, self.n_embd))
        return add(mul(y, self._weight(net, at, "ln")), net.weights[f"{at}time_mix_ln.bias"])

    def _interpolate(self, net: Net, at: str, x: Tensor) -> dict[str, Tensor]:
        """x_i for each of LETTERS. Adapters do not update the low-rank matrices, as in
        llama.cpp."""
        before = change(net, f"{at}time_shift", x)
        mixed = add(x, mul(before, self._weight(net, at, "lerp_x")))
        inner = tanh(mul_mat(self._weight(net, at, "w1"), mixed))
        second, moved = self._weight(net, at, "w2"), dict[str, Tensor]()
        for i, part in enumerate(split(inner, (self.extra,) * 5)):
            w = reshape(narrow(second, 0, i, 1), (self.n_embd, self.extra))
            share = add(mul_mat(w, part), self._lerp(net, at, i))
            moved[LETTERS[i]] = net.in_turn(add(mul(share, before), x))
        return moved

    def _lerp(self, net: Net, at: str, i: int) -> Tensor:
        if not self.fused:
            return self._weight(net, at, f"lerp_{LETTERS[i]}")
        return reshape(narrow(self._weight(net, at, "lerp_fused"), 0, i, 1), (self.n_embd,))

    def _decay(self, net: Net, at: str, x: Tensor) -> Tensor:
        inner = tanh(mul_mat(self._weight(net, at, "decay_w1"), x))
        w = add(mul_mat(self._weight(net, at, "decay_w2"), inner), self._weight(net, at, "decay"))
        return reshape(exp(neg(exp(w))), (-1, *self._state[:2]))

    def _of_all_heads(self, x: Tensor) -> Tensor:
        """(T, n_kv · size) as (T, heads, size): heads that follow one another share one."""
        n_tokens, n_heads = x.shape[0], self.n_embd // self.size
        if self.n_kv != n_heads:
            x = reshape(x, (n_tokens, self.n_kv, 1, self.size))
            x = repeat(x, (n_tokens, self.n_kv, n_heads // self.n_kv, self.size))
        return reshape(x, (n_tokens, n_heads, self.size))

    def _weight(self, net: Net, at: str, name: str) -> Tensor:
        return net.weights[f"{at}time_mix_{name}.weight"]
