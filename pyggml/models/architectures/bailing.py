"""bailingmoe (Ling and Ring) and bailingmoe2 (their second version). Experts beside a shared one;
bailingmoe2 has norms of each head of q and k, and groups of experts. bailingmoe has experts in
every layer: llama.cpp reads leading_dense_block_count and passes over it.
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import EXAMPLE, read_counted_length, read_feed_forward, read_router
from pyggml.ops import soft_max, swiglu


def _bailing(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    router = read_router(r, 1) | {"gating": soft_max, "biased": False}
    more = router | {"dense": lambda layer: False}
    feed_forward = read_feed_forward(r, b, swiglu, read_counted_length(r), **more)

    return b.decoder(lambda i: b.pre_norm(b.attention(i), feed_forward[i]), tied=False)


def _bailing2(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", fused_qkv=True)
    feed_forward = read_feed_forward(
        r, b, swiglu, read_counted_length(r, own=True), **read_router(r)
    )

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), feed_forward[i])

    return b.decoder(block, tied=False)


_GROUPS: dict[str, object] = {
    "expert_count": 8,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_gating_func": 2,
}
BAILINGMOE = Architecture("bailingmoe", _bailing, EXAMPLE)
BAILINGMOE2 = Architecture("bailingmoe2", _bailing2, EXAMPLE | _GROUPS)
