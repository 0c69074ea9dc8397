"""qwen: Qwen 1. As qwen2 with q, k and v in one matrix; feed_forward_length counts gate and up."""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Reader
from pyggml.models.basics import read_basics
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", fused_qkv=True)
    b = replace(b, n_ff=tuple(max(n // 2, 1) for n in b.n_ff))

    return b.decoder(lambda i: b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu)), tied=False)


QWEN = Architecture("qwen", _decoder, {"attention.head_count_kv": 4})
