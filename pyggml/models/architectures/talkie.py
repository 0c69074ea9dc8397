"""talkie: Talkie. No norm has a weight but a gain of each head of q; norms of q and k come after
rope. A multiple of the normalised embedding is added after each block."""

from dataclasses import dataclass, replace
from functools import partial

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.config import rms_eps
from pyggml.models.net import Net
from pyggml.models.norm import RmsNorm
from pyggml.models.weights import Tensors, TensorSpec, merge_tensors
from pyggml.ops import add, mul, swiglu


@dataclass(frozen=True, slots=True)
class _PlusEmbedding(Part):
    """body(x) + layer_output_scale · the input of the first block."""

    body: Part

    def tensors(self, at: str) -> Tensors:
        scale = {f"{at}layer_output_scale.weight": TensorSpec((1,))}
        return merge_tensors([self.body.tensors(at), scale])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        first = net.once("input of the first block", lambda: x)
        factor = net.weights[f"{at}layer_output_scale.weight"]
        return add(self.body(net, at, x), mul(first, factor))


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    eps = rms_eps(r)
    plain = replace(b, norm=partial(RmsNorm, size=b.config.n_embd, eps=eps, has=()))

    def block(i: int) -> Part:
        h = b.heads[i]
        q_norm = RmsNorm("attn_q_norm", h.size, eps, heads=(h.n, 1))
        k_norm = RmsNorm("attn_k_norm", h.size, eps, ())
        attention = b.attention(i, q_norm=q_norm, k_norm=k_norm, norms_last=True)
        return _PlusEmbedding(plain.pre_norm(attention, b.gated_mlp(i, swiglu)))

    return plain.decoder(
        block,
        tied=False,
        prelude=plain.norm("token_embd_norm"),
        logit_scale=r.number("logit_scale", None, -1e6, 1e6),
    )


TALKIE = Architecture("talkie", _decoder, {"logit_scale": 0.5})
