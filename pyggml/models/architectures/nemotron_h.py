"""nemotron_h and nemotron_h_moe: Nemotron H and Nemotron 3. A block is one part: Mamba 2 where a
layer has neither key heads nor a feed-forward length, attention without positions where it has no
such length, else a feed-forward part without a gate, or experts beside a shared one.

Experts may work in a space of their own, with a matrix into it and one out of it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.block import Sum, residual
from pyggml.models.experts import MIXTURE, Experts, has_experts, read_experts, read_router
from pyggml.models.feed_forward import FeedForward
from pyggml.models.mamba2 import STATES, read_mamba2
from pyggml.models.net import Net
from pyggml.models.weights import Tensors, latent_matrix, matrix, merge_tensors
from pyggml.ops import relu, sigmoid, sqr


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatentExperts(Experts):
    """ffn_latent_up(experts(ffn_latent_down x)); the router and its weights have all of x.

    n_outer   numbers of x, where the experts' n_embd is that of their space
    """

    n_outer: int = 0

    def tensors(self, at: str) -> Tensors:
        router = matrix(f"{at}ffn_gate_inp", self.n_expert, self.n_outer, bias=False, usual=False)
        down = latent_matrix(f"{at}ffn_latent_down", self.n_embd, self.n_outer)
        up = latent_matrix(f"{at}ffn_latent_up", self.n_outer, self.n_embd)
        return merge_tensors([Experts.tensors(self, at), router, down, up])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        inner = net.linear(f"{at}ffn_latent_down", x)
        return net.linear(f"{at}ffn_latent_up", self.mix(net, at, inner, x))


def _squared_relu(x: Tensor) -> Tensor:
    return sqr(relu(x))


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope=None, least_heads=0, least_ff=0)
    mamba = read_mamba2(r, b.config.n_embd)
    scale = r.number("attention.scale", 0.0, 0.0, 1e6)
    mixtures = _mixtures(r, b) if has_experts(r) else ()

    def part(i: int) -> Part:
        if b.n_ff[i]:
            return mixtures[i] if mixtures else b.plain(i, _squared_relu)
        return b.attention(i, scale=scale) if b.heads[i].n_kv else mamba

    return b.decoder(lambda i: residual(b.norm("attn_norm"), part(i)))


def _mixtures(r: Reader, b: Basics) -> list[Part]:
    n_embd = b.config.n_embd
    router = read_router(r, 2) | {"gating": sigmoid, "biased": True, "gated": False}
    latent = r.count("moe_latent_size", 0, least=0, most=1 << 16)
    in_space: dict[str, Any] = {"kind": _LatentExperts, "width": latent, "n_outer": n_embd}
    router |= in_space if latent else {}
    experts = read_experts(r, b, _squared_relu, least=0, **router)
    n_ff = r.count("expert_shared_feed_forward_length", most=1 << 20)
    shared = FeedForward(n_embd, n_ff, _squared_relu, suffix="_shexp")
    return [Sum((e, shared)) for e in experts]


_HYBRID: dict[str, object] = {
    "block_count": 3,
    "attention.head_count_kv": np.array([0, 2, 0], np.int32),
    "feed_forward_length": np.array([0, 0, 256], np.int32),
    **STATES,
}
NEMOTRON_H = Architecture("nemotron_h", _decoder, _HYBRID)
NEMOTRON_H_MOE = Architecture(
    "nemotron_h_moe",
    _decoder,
    _HYBRID
    | MIXTURE
    | {"expert_shared_feed_forward_length": 256, "moe_latent_size": 128}
    | {"expert_weights_norm": True, "expert_weights_scale": 1.5},
)
