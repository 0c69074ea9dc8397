"""The mixers of Qwen 3 Next and 3.5, gated delta nets and gated attention; Kimi's delta
attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.attention import Attention
from pyggml.models.basics import Basics
from pyggml.models.config import ModelConfig, Reader, rms_eps
from pyggml.models.decoder import Decoder
from pyggml.models.net import Net
from pyggml.models.norm import RmsNorm
from pyggml.models.part import Part
from pyggml.models.recurrent import CausalConv, initial, keep_state
from pyggml.models.weights import Tensors, TensorSpec, latent_matrix, matrix, merge_tensors
from pyggml.ops import (
    add,
    gated_delta_net,
    halve,
    mul,
    repeat,
    reshape,
    rms_norm,
    scale,
    sigmoid,
    silu,
    softplus,
    split,
    swiglu,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttention(Attention):
    """attn_output(sigmoid(gate) · attention). attn_q has the rows of a head's query, then those
    of its gate, head by head."""

    def tensors(self, at: str) -> Tensors:
        wide = matrix(f"{at}attn_q", 2 * self.sizes["q"], self.n_embd)
        return {**Attention.tensors(self, at), **wide}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        size, n_tokens = self.heads.size, x.shape[0]
        q, gate = halve(reshape(net.linear(f"{at}attn_q", x), (n_tokens, -1, 2 * size)))
        k, v = (net.linear(f"{at}attn_{part}", x) for part in "kv")
        o = self.attend(net, at, *self.normalise_heads(net, at, q, k, v))
        return net.linear(f"{at}attn_output", mul(o, sigmoid(reshape(gate, o.shape))))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet(Part):
    """ssm_out(silu(z) · norm(delta_rule(q, k, v))), with a short convolution before q, k and v.

    n_keys     heads of q and k, of `size` numbers each
    n_values   heads of v, of `size` numbers each
    grouped    head h of v has key h div (n_values / n_keys); strengths β and decays come from one
               matrix, ssm_ba. Else it has key h mod n_keys, and there are ssm_beta and ssm_alpha
    """

    n_embd: int
    n_keys: int
    n_values: int
    size: int
    width: int
    eps: float
    grouped: bool

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Numbers in a token's query, key and value, over all heads."""
        keys = self.n_keys * self.size
        return keys, keys, self.n_values * self.size

    @property
    def _conv(self) -> CausalConv:
        return CausalConv("ssm_conv1d", sum(self._sizes), self.width, bias=False)

    @property
    def _norm(self) -> RmsNorm:
        return RmsNorm("ssm_norm", self.size, self.eps)

    @property
    def _state(self) -> Shape:
        return self.n_values, self.size, self.size

    def tensors(self, at: str) -> Tensors:
        n, n_values = self.n_embd, self.n_values
        rates = {"ba": 2 * n_values} if self.grouped else {"beta": n_values, "alpha": n_values}
        return merge_tensors(
            [
                matrix(f"{at}attn_qkv", sum(self._sizes), n, bias=False),
                matrix(f"{at}attn_gate", self._sizes[2], n, bias=False),
                self._conv.tensors(at),
                *(
                    # Fewer rows than a usual rank, so adapters update them only on request.
                    matrix(f"{at}ssm_{name}", rows, n, bias=False, usual=False)
                    for name, rows in rates.items()
                ),
                {f"{at}ssm_{name}": TensorSpec((n_values,)) for name in ("dt.bias", "a")},
                self._norm.tensors(at),
                matrix(f"{at}ssm_out", n, self._sizes[2], bias=False),
            ]
        )

    def state(self, at: str) -> Mapping[str, Spec]:
        return {**self._conv.state(at), f"{at}delta_state": Spec(self._state)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        qkv = silu(self._conv(net, at, net.linear(f"{at}attn_qkv", x)))
        q, k, v = (reshape(t, (x.shape[0], -1, self.size)) for t in split(qkv, self._sizes))
        beta, alpha = self._rates(net, at, x)
        decay = mul(
            softplus(add(alpha, net.weights[f"{at}ssm_dt.bias"])), net.weights[f"{at}ssm_a"]
        )
        y = gated_delta_net(
            initial(net, f"{at}delta_state", self._state),
            self._key(q),
            self._key(k),
            v,
            decay,
            sigmoid(beta),
            net.inputs.positions,
        ).named(f"{at}delta_net")
        y = self._norm(net, at, keep_state(net, f"{at}delta_state", y))
        z = reshape(net.linear(f"{at}attn_gate", x), y.shape)
        return net.linear(f"{at}ssm_out", reshape(swiglu(z, y), (x.shape[0], -1)))

    def _rates(self, net: Net, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of strengths and decays, (T, n_values) each."""
        if not self.grouped:
            return net.linear(f"{at}ssm_beta", x), net.linear(f"{at}ssm_alpha", x)
        both = reshape(net.linear(f"{at}ssm_ba", x), (x.shape[0], self.n_keys, -1))
        beta, alpha = (reshape(t, (x.shape[0], self.n_values)) for t in halve(both))
        return beta, alpha

    def _key(self, x: Tensor) -> Tensor:
        """x (T, n_keys, size), scaled to length 1. If grouped: repeated for each head of v."""
        unit = _of_length_one(x, self.eps)
        if not self.grouped:
            return unit
        n_tokens, n, size = x.shape
        each = (n_tokens, n, self.n_values // n, size)
        return reshape(repeat(reshape(unit, (n_tokens, n, 1, size)), each), (n_tokens, -1, size))


def _of_length_one(x: Tensor, eps: float) -> Tensor:
    """x / √(Σ x² + eps) over the last axis."""
    size = x.shape[-1]
    return scale(rms_norm(x, eps / size), size**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(Part):
    """attn_output(sigmoid(g x) · norm(delta_rule(q, k, v))), q, k and v each behind a short
    convolution, with a decay of each of a head's numbers. llama.cpp passes over adapters here.

    n_head     heads of q, k and v, of `size` numbers each
    width      tokens of a convolution
    low_rank   the matrices f, of decays, and g are two each, f_b f_a
    least      least logarithm of a decay: least · sigmoid(a · f x); 0: it is a · softplus(f x)
    """

    n_embd: int
    n_head: int
    size: int
    width: int
    eps: float
    low_rank: bool = True
    least: float = 0.0

    @property
    def _n_inner(self) -> int:
        return self.n_head * self.size

    @property
    def _convs(self) -> tuple[CausalConv, ...]:
        names = (f"ssm_conv1d_{part}" for part in "qkv")
        return tuple(CausalConv(n, self._n_inner, self.width, False, apart=True) for n in names)

    @property
    def _norm(self) -> RmsNorm:
        return RmsNorm("ssm_norm", self.size, self.eps)

    @property
    def _state(self) -> Shape:
        return self.n_head, self.size, self.size

    def tensors(self, at: str) -> Tensors:
        n, n_inner = self.n_embd, self._n_inner
        matrices = [latent_matrix(f"{at}attn_{part}", n_inner, n) for part in "qkv"]
        for part in "fg":
            first = self.size if self.low_rank else n_inner
            matrices.append(latent_matrix(f"{at}ssm_{part}_a", first, n))
            if self.low_rank:
                matrices.append(latent_matrix(f"{at}ssm_{part}_b", n_inner, self.size))
        rates = {
            f"{at}ssm_a": TensorSpec((self.n_head, 1), unpacked=True),
            f"{at}ssm_dt.bias": TensorSpec((n_inner,)),
        }
        output = latent_matrix(f"{at}attn_output", n, n_inner)
        beta = latent_matrix(f"{at}ssm_beta", self.n_head, n)
        convs = [conv.tensors(at) for conv in self._convs]
        return merge_tensors([*convs, *matrices, beta, rates, self._norm.tensors(at), output])

    def state(self, at: str) -> Mapping[str, Spec]:
        convs = {name: spec for conv in self._convs for name, spec in conv.state(at).items()}
        return convs | {f"{at}delta_state": Spec(self._state)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        shape = (x.shape[0], self.n_head, self.size)
        q, k, v = (
            reshape(silu(conv(net, at, net.linear(f"{at}attn_{part}", x))), shape)
            for part, conv in zip("qkv", self._convs, strict=True)
        )
        y = gated_delta_net(
            initial(net, f"{at}delta_state", self._state),
            _of_length_one(q, self.eps),
            _of_length_one(k, self.eps),
            v,
            self._decay(net, at, x),
            sigmoid(net.linear(f"{at}ssm_beta", x)),
            net.inputs.positions,
        ).named(f"{at}delta_net")
        y = self._norm(net, at, keep_state(net, f"{at}delta_state", y))
        gate = sigmoid(reshape(self._product(net, f"{at}ssm_g", x), shape))
        return net.linear(f"{at}attn_output", reshape(mul(y, gate), (x.shape[0], -1)))

    def _decay(self, net: Net, at: str, x: Tensor) -> Tensor:
        """The logarithms of decays (T, n_head, size)."""
        shape, a = (x.shape[0], self.n_head, self.size), net.weights[f"{at}ssm_a"]
        raw = add(self._product(net, f"{at}ssm_f", x), net.weights[f"{at}ssm_dt.bias"])
        if self.least:
            return scale(sigmoid(mul(reshape(raw, shape), a)), self.least)
        return mul(reshape(softplus(raw), shape), a)

    def _product(self, net: Net, name: str, x: Tensor) -> Tensor:
        y = net.linear(f"{name}_a", x)
        return net.linear(f"{name}_b", y) if self.low_rank else y


def read_delta_net(r: Reader, n_embd: int, eps: float, grouped: bool) -> DeltaNet:
    """The delta net of a file. Heads of keys and of values must have one length."""
    size = r.count("ssm.state_size", most=1 << 12)
    n_values = r.count("ssm.time_step_rank", most=1 << 12)
    n_keys = r.count("ssm.group_count", most=1 << 12)
    n_inner = r.count("ssm.inner_size", most=1 << 24)
    if n_inner != n_values * size or n_values % n_keys:
        r.faults.append(
            f"ssm.inner_size {n_inner}, state_size {size}, time_step_rank {n_values} and "
            f"group_count {n_keys}: wanted {n_values} × {size}, and keys that divide the heads"
        )
        n_values = n_keys
    return DeltaNet(
        n_embd=n_embd,
        n_keys=n_keys,
        n_values=n_values,
        size=size,
        width=r.count("ssm.conv_kernel", least=2, most=64),
        eps=eps,
        grouped=grouped,
    )


def is_recurrent(r: Reader, c: ModelConfig) -> tuple[bool, ...]:
    """For each layer, whether it has a delta net: by default all but every fourth."""
    period = r.count("full_attention_interval", 4, most=1024)
    usual = tuple((i + 1) % period != 0 for i in range(c.n_blocks))
    return r.flags("attention.recurrent_layers", c.n_blocks, usual)[: c.n_layer]


def read_kimi_delta(r: Reader, b: Basics, **more: Any) -> KimiDelta:
    """Kimi's delta attention of all layers that have it; more: fields that differ."""
    return KimiDelta(
        n_embd=b.config.n_embd,
        n_head=b.heads[0].n,
        size=r.count("kda.head_dim", most=1 << 12),
        width=r.count("ssm.conv_kernel", least=2, most=64),
        eps=rms_eps(r),
        **more,
    )


def kimi_decoder(
    b: Basics, delta: Part, attention: Part, feed_forward: Sequence[Part], **more: Any
) -> Decoder:
    """A decoder whose layers with key heads have the attention, and others the delta rule."""

    def block(i: int) -> Part:
        return b.pre_norm(attention if b.heads[i].n_kv else delta, feed_forward[i])

    return b.decoder(block, adapts_output=False, **more)


# Beside those of latent attention and of a mixture.
KIMI_EXAMPLE: dict[str, object] = {
    "attention.head_count_kv": np.array([0, 1], np.int32),
    "kda.head_dim": 8,
    "ssm.conv_kernel": 4,
}
