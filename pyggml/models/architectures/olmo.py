"""olmo, olmo2 (OLMo 2, and OLMo 3 with windows in some layers) and olmoe.

olmo    layer norms without weights; q, k and v may be clamped
olmo2   norms after attention and feed-forward instead of before; norms of q and of k, each over
        all heads at once
olmoe   the usual norms before attention and experts; norms of q and k as in olmo2
"""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.experts import read_experts
from pyggml.ops import swiglu


def _olmo(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", layer_norm=())
    limit = r.number("attention.clamp_kqv", 0.0, 0.0, 1e6)

    return b.decoder(lambda i: b.pre_norm(b.attention(i, clamp=limit), b.gated_mlp(i, swiglu)))


def _olmo2(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    plain = replace(b.rotary, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
    windows = read_windows(r, b, 4, window=0, rope=plain)

    def block(i: int) -> Part:
        attention = b.attention(i, **b.norms_of_all_heads(i), **windows[i])
        return b.post_norm(attention, b.gated_mlp(i, swiglu))

    return b.decoder(block, tied=False)


def _olmoe(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    experts = read_experts(r, b, swiglu, own_length=False, normalised=False)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.norms_of_all_heads(i)), experts[i])

    return b.decoder(block, tied=False)


OLMO = Architecture("olmo", _olmo, {"attention.clamp_kqv": 2.0})
OLMO2 = Architecture("olmo2", _olmo2, WINDOWS)
OLMOE = Architecture("olmoe", _olmoe, {"expert_count": 4, "expert_used_count": 2})
