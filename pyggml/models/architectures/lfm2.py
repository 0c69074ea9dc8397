"""lfm2 (LFM 2) and lfm2moe. The mixer of most blocks is a gated short convolution, of the others
attention. lfm2moe has experts in all layers but the first few."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.experts import MIXTURE, read_experts, read_gating
from pyggml.models.net import Net
from pyggml.models.recurrent import CausalConv
from pyggml.models.weights import Tensors, matrix, merge_tensors
from pyggml.ops import mul, split, swiglu


@dataclass(frozen=True, slots=True)
class ShortConv(Part):
    """out_proj(c · conv(b · u)), (b, c, u) = in_proj(x)."""

    n_embd: int
    width: int

    @property
    def _conv(self) -> CausalConv:
        return CausalConv("shortconv.conv", self.n_embd, self.width, bias=False)

    def tensors(self, at: str) -> Tensors:
        n = self.n_embd
        return merge_tensors(
            [
                matrix(f"{at}shortconv.in_proj", 3 * n, n, bias=False),
                self._conv.tensors(at),
                matrix(f"{at}shortconv.out_proj", n, n, bias=False),
            ]
        )

    def state(self, at: str) -> Mapping[str, Spec]:
        return self._conv.state(at)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        b, c, u = split(net.linear(f"{at}shortconv.in_proj", x), (self.n_embd,) * 3)
        return net.linear(f"{at}shortconv.out_proj", mul(c, self._conv(net, at, mul(b, u))))


def _dense(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", least_heads=0)
    window = r.count("attention.sliding_window", 0, least=0)
    return _decoder(r, b, [b.gated_mlp(i, swiglu) for i in range(b.config.n_layer)], window)


def _with_experts(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", least_heads=0)
    n_dense = r.count("leading_dense_block_count", 0, least=0, most=1024)
    experts = read_experts(r, b, swiglu, gating=read_gating(r), biased=True)
    layers = range(b.config.n_layer)
    return _decoder(r, b, [b.gated_mlp(i, swiglu) if i < n_dense else experts[i] for i in layers])


def _decoder(r: Reader, b: Basics, feed_forward: Sequence[Part], window: int = 0) -> Decoder:
    conv = ShortConv(b.config.n_embd, r.count("shortconv.l_cache", least=2, most=64))

    def block(i: int) -> Part:
        attends = b.heads[i].n_kv > 0
        mixer = b.attention(i, window=window, **b.head_norms(i)) if attends else conv
        return b.pre_norm(mixer, feed_forward[i])

    # The last norm is named token_embd_norm in llama.cpp, embedding_norm in transformers.
    return b.decoder(block, norm=replace(b.norm(""), name="token_embd_norm"))


_EXAMPLE = {"shortconv.l_cache": 3, "attention.head_count_kv": np.array([0, 2], np.int32)}

LFM2 = Architecture("lfm2", _dense, _EXAMPLE)
LFM2MOE = Architecture(
    "lfm2moe",
    _with_experts,
    _EXAMPLE | MIXTURE | {"leading_dense_block_count": 1, "expert_gating_func": 2},
)
