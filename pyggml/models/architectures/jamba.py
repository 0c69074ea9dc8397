"""jamba: Jamba. Attention without positions in some layers, Mamba with norms in the others; a layer
has experts if the file has no ffn_gate for it."""

from collections.abc import Sequence

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import has_experts, read_experts
from pyggml.models.mamba import read_mamba
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope=None, least_heads=0)
    mamba = read_mamba(r, b.config.n_embd, weighted=True)
    experts: Sequence[Part] = ()
    if has_experts(r):
        experts = read_experts(r, b, swiglu, own_length=False, normalised=False)

    def block(i: int) -> Part:
        mixer = b.attention(i) if b.heads[i].n_kv else mamba
        mixed = experts and f"blk.{i}.ffn_gate.weight" not in r.shapes
        return b.pre_norm(mixer, experts[i] if mixed else b.gated_mlp(i, swiglu))

    return b.decoder(block)


JAMBA = Architecture(
    "jamba",
    _decoder,
    {
        "attention.head_count_kv": np.array([0, 2], np.int32),
        "ssm.inner_size": 512,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 16,
        "ssm.conv_kernel": 4,
        "expert_count": 4,
        "expert_used_count": 2,
    },
)
