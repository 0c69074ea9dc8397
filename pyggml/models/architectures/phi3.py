"""phi3 (Phi 3 and 4) and phimoe (Phi 3.5 MoE). As qwen2, with q, k and v in one matrix and gate and
up in another.

The file's sliding window is ignored, as in llama.cpp: its converter writes a wrong one. phimoe has
experts, and RMS norms with biases: as llama.cpp has them, not layer norms as the published model.
"""

from dataclasses import replace
from functools import partial

from pyggml.models.architecture import Architecture, Decoder, Reader
from pyggml.models.basics import read_basics
from pyggml.models.config import rms_eps
from pyggml.models.experts import read_experts
from pyggml.models.norm import RmsNorm
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", fused_qkv=True)

    return b.decoder(lambda i: b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu, fused=True)))


def _with_experts(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    norm = partial(RmsNorm, size=b.config.n_embd, eps=rms_eps(r), has=("weight", "bias"))
    b = replace(b, norm=norm)
    experts = read_experts(r, b, swiglu, own_length=False)

    return b.decoder(lambda i: b.pre_norm(b.attention(i), experts[i]), tied=False)


PHI3 = Architecture("phi3", _decoder, {})
PHIMOE = Architecture("phimoe", _with_experts, {"expert_count": 4, "expert_used_count": 2})
