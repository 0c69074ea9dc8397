"""deepseek (DeepSeek V1 with experts) and dots1 (dots.llm1). The first layers are dense, the others
have experts beside a shared one; dots1 has norms of each head of q and k."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import read_feed_forward, read_router
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _deepseek(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    scale = r.number("attention.scale", 0.0, 0.0, 1e6)
    factor = r.number("expert_weights_scale", 0.0, -1e6, 1e6) or 1.0
    feed_forward = read_feed_forward(r, b, swiglu, _shared_n_ff(r), normalised=False, factor=factor)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, scale=scale), feed_forward[i])

    return b.decoder(block)


def _dots1(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    feed_forward = read_feed_forward(r, b, swiglu, _shared_n_ff(r), **read_router(r))

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), feed_forward[i])

    return b.decoder(block, tied=False)


def _shared_n_ff(r: Reader) -> int:
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    return n_ff * r.count("expert_shared_count", least=0, most=64)


_EXPERTS: dict[str, object] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.5,
}
DEEPSEEK = Architecture("deepseek", _deepseek, _EXPERTS)
DOTS1 = Architecture(
    "dots1",
    _dots1,
    _EXPERTS | {"expert_gating_func": 2, "expert_weights_norm": True, "attention.head_count_kv": 4},
)
