"""hy_v3: Hy 3. As qwen3, with experts beside a shared one in all layers but the first few; whether
a layer is dense, its tensors say."""

from pyggml.models.architecture import Architecture, Decoder, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import (
    MIXTURE,
    SIGMOID,
    dense_without_router,
    read_feed_forward,
    read_router,
)
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    shared = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20) or n_ff
    router = read_router(r, SIGMOID) | {"bare": True}
    feed_forward = read_feed_forward(r, b, swiglu, shared, dense_without_router(r), **router)

    return b.decoder(lambda i: b.pre_norm(b.attention(i, **b.head_norms(i)), feed_forward[i]))


HY_V3 = Architecture(
    "hy_v3",
    _decoder,
    MIXTURE
    | {"leading_dense_block_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5},
)
