"""deepseek (DeepSeek V1 with experts) and dots1 (dots.llm1). The first layers are dense, the others
have experts beside a shared one; dots1 has norms of each head of q and k."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import EXAMPLE, read_counted_length, read_feed_forward, read_router
from pyggml.ops import swiglu


def _deepseek(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    scale = r.number("attention.scale", 0.0, 0.0, 1e6)
    factor = r.number("expert_weights_scale", 0.0, -1e6, 1e6) or 1.0
    feed_forward = read_feed_forward(
        r, b, swiglu, read_counted_length(r), normalised=False, factor=factor
    )

    return b.decoder(lambda i: b.pre_norm(b.attention(i, scale=scale), feed_forward[i]))


def _dots1(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    feed_forward = read_feed_forward(r, b, swiglu, read_counted_length(r), **read_router(r))

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), feed_forward[i])

    return b.decoder(block, tied=False)


DEEPSEEK = Architecture("deepseek", _deepseek, EXAMPLE)
DOTS1 = Architecture(
    "dots1", _dots1, EXAMPLE | {"expert_gating_func": 2, "attention.head_count_kv": 4}
)
