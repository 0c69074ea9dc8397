"""hunyuan-dense, hunyuan_vl (its text) and hunyuan-moe. Norms of each head of q and k come after
rope. hunyuan-moe has experts beside a shared one. rope.scaling.alpha raises the rotary base."""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.block import Sum
from pyggml.models.experts import MIXTURE, read_experts, read_shared
from pyggml.models.rope import check_sections
from pyggml.ops import swiglu


def _dense(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    alpha, size = r.number("rope.scaling.alpha", 0.0, 0.0, 1e6), b.heads[0].size
    base = b.rotary.freq_base * (alpha ** (size / max(size - 2, 1)) if alpha else 1.0)
    if any(r.counts("rope.dimension_sections", 4, (0,) * 4, least=0, most=1 << 12)):
        check_sections(r, b.rotary)
    rope = replace(b.rotary, freq_base=base)

    def block(i: int) -> Part:
        attention = b.attention(i, rope=rope, norms_last=True, **b.head_norms(i))
        return b.pre_norm(attention, b.gated_mlp(i, swiglu))

    return b.decoder(block)


def _with_experts(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    experts = read_experts(r, b, swiglu, own_length=False)
    shared = [read_shared(r, b, swiglu, n) for n in b.n_ff]

    def block(i: int) -> Part:
        beside = shared[i]
        assert beside is not None, "its length is the layer's if the file has none"
        attention = b.attention(i, norms_last=True, **b.head_norms(i))
        return b.pre_norm(attention, Sum((experts[i], beside)))

    return b.decoder(block)


HUNYUAN_DENSE = Architecture("hunyuan-dense", _dense, {})
HUNYUAN_VL = Architecture("hunyuan_vl", _dense, {"rope.scaling.alpha": 1000.0})
HUNYUAN_MOE = Architecture(
    "hunyuan-moe", _with_experts, MIXTURE | {"expert_shared_feed_forward_length": 256}
)
