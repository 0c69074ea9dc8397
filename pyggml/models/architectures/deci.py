"""deci: Nemotron 51B, Super and Ultra. As llama, but a layer may lack attention or its feed-forward
part, or have a matrix instead of attention.

A layer without a feed-forward part has no attention either: llama.cpp would pass over it.
"""

from dataclasses import dataclass

import numpy as np

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.block import Chain, residual
from pyggml.models.net import Net
from pyggml.models.weights import Tensors, matrix
from pyggml.ops import swiglu


@dataclass(frozen=True, slots=True)
class _Matrix(Part):
    """attn_output x."""

    n_embd: int

    def tensors(self, at: str) -> Tensors:
        return matrix(f"{at}attn_output", self.n_embd, self.n_embd, bias=False)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        return net.linear(f"{at}attn_output", x)


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", least_heads=0, least_ff=0)

    if any(h.n and not n_ff for h, n_ff in zip(b.heads, b.n_ff, strict=True)):
        r.faults.append("deci: a layer has attention and no feed-forward part, wanted both or none")

    def block(i: int) -> Part:
        if not b.n_ff[i]:
            return Chain(())
        mixer = b.attention(i) if b.heads[i].n_kv else _Matrix(b.config.n_embd)
        mix = (residual(b.norm("attn_norm"), mixer),) if b.heads[i].n else ()
        return Chain((*mix, residual(b.norm("ffn_norm"), b.gated_mlp(i, swiglu))))

    return b.decoder(block)


DECI = Architecture("deci", _decoder, {"attention.head_count_kv": np.array([2, 0], np.int32)})
