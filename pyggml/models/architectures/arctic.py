"""arctic: Snowflake Arctic. Experts of a layer's input are added to attention and a dense
feed-forward part, whose length is that of the embedding."""

from dataclasses import dataclass

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.block import Chain, Sum
from pyggml.models.experts import Experts, read_experts
from pyggml.models.feed_forward import GatedFeedForward
from pyggml.ops import swiglu


@dataclass(frozen=True, slots=True, kw_only=True)
class _BesideBlock(Experts):
    """Experts beside a whole block, whose feed-forward part has the name that is usual."""

    branch = "experts_out"


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    experts = read_experts(r, b, swiglu, own_length=False, kind=_BesideBlock)
    dense = GatedFeedForward(b.config.n_embd, b.config.n_embd, swiglu)

    def block(i: int) -> Part:
        mixture = Chain((b.norm("ffn_norm_exps"), experts[i]))
        return Sum((b.pre_norm(b.attention(i), dense), mixture))

    return b.decoder(block)


ARCTIC = Architecture("arctic", _decoder, {"expert_count": 4, "expert_used_count": 2})
