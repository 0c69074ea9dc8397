"""mpt: MPT 7B and 30B. ALiBi, layer norms without biases, no gate; some have norms of q and of k.

A learned position embedding, biases and clamping are used if the file has them. Scales of the
activation (AWQ) are refused.
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.norm import LayerNorm, Norm
from pyggml.ops import gelu


def _decoder(r: Reader) -> Decoder:
    has_bias = "output_norm.bias" in r.shapes
    b = read_basics(
        r, rope=None, fused_qkv=True, layer_norm=("weight", "bias") if has_bias else ("weight",)
    )
    usual = {
        "max_bias": r.number("attention.max_alibi_bias", 0.0, 0.0, 1e3),
        "clamp": r.number("attention.clamp_kqv", 0.0, 0.0, 1e6),
    }

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **usual, **_norms(r, b, i)), b.plain(i, gelu))

    learned = "position_embd.weight" in r.shapes
    return b.decoder(block, n_positions=b.config.n_ctx if learned else 0)


def _norms(r: Reader, b: Basics, layer: int) -> dict[str, Norm]:
    """Norms of q and k, each over all heads at once, if the file has them."""
    at, h, eps = f"blk.{layer}.attn_", b.heads[layer], b.norm("").eps
    sizes = {"q": h.n * h.size, "k": h.n_kv * h.size}
    return {
        f"{x}_norm": LayerNorm(
            f"attn_{x}_norm",
            n,
            eps,
            tuple(p for p in ("weight", "bias") if f"{at}{x}_norm.{p}" in r.shapes),
        )
        for x, n in sizes.items()
        if f"{at}q_norm.weight" in r.shapes
    }


MPT = Architecture("mpt", _decoder, {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 2.0})
