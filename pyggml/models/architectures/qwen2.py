"""qwen2 (Qwen 2 and 2.5) and qwen2moe. Biases on q, k and v; rotary pairs are (i, i + d/2).
qwen2moe has experts and a gated shared expert."""

from pyggml.models.architecture import Architecture, Decoder, Reader
from pyggml.models.basics import read_basics
from pyggml.models.block import Sum
from pyggml.models.experts import MIXTURE, GatedPart, read_experts, read_shared
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    return b.decoder(lambda i: b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu)))


def _with_experts(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    experts = read_experts(r, b, swiglu, normalised=False)
    shared = read_shared(r, b, swiglu, b.n_ff[0])
    assert shared is not None, "its length is the layer's if the file has none"
    gated = GatedPart(shared, b.config.n_embd)

    return b.decoder(lambda i: b.pre_norm(b.attention(i), Sum((experts[i], gated))), tied=False)


QWEN2 = Architecture("qwen2", _decoder, {})
QWEN2MOE = Architecture(
    "qwen2moe", _with_experts, MIXTURE | {"expert_shared_feed_forward_length": 256}
)
