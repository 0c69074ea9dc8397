"""falcon-h1: Falcon H1. Attention and Mamba 2 are parallel, with one norm. The bias of attn_output
and frequency factors are passed over, as in llama.cpp."""

from dataclasses import dataclass, replace

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.block import Chain, Sum, residual
from pyggml.models.config import rms_eps
from pyggml.models.mamba2 import STATES, read_mamba2
from pyggml.models.net import Net
from pyggml.models.norm import RmsNorm
from pyggml.models.weights import Tensors, TensorSpec
from pyggml.ops import rms_norm_mul, swiglu


@dataclass(frozen=True, slots=True)
class _BareNorm(RmsNorm):
    """An RMS norm whose weight has the name of the norm itself."""

    def tensors(self, at: str) -> Tensors:
        return {f"{at}{self.name}": TensorSpec((self.size,))}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        name = f"{at}{self.name}"
        return net.tap(name, rms_norm_mul(x, net.weights[name], self.eps).named(name))


def _decoder(r: Reader) -> Decoder:
    """The files of most sizes have no norm in Mamba 2."""
    b = read_basics(r, rope="neox")
    mamba = read_mamba2(r, b.config.n_embd)
    norm = _BareNorm("ffn_norm", b.config.n_embd, rms_eps(r))
    scale = r.number("attention.scale", 0.0, 0.0, 1e6)

    def block(i: int) -> Part:
        normed = f"blk.{i}.ssm_norm.weight" in r.shapes
        mixers = Sum((b.attention(i, scale=scale), replace(mamba, normed=normed)))
        return Chain(
            (residual(b.norm("attn_norm"), mixers), residual(norm, b.gated_mlp(i, swiglu)))
        )

    return b.decoder(block, unread=("attn_output.bias", "rope_freqs.weight"))


FALCON_H1 = Architecture("falcon-h1", _decoder, STATES)
