"""plamo (PLaMo 13B), plamo2 and plamo3. In plamo, attention and feed-forward are parallel, with one
norm. The others have four norms in a block; plamo3 has windows in some layers, which rotate as if
the file had no scaling, plamo2 a Mamba with a decay for each head in layers without key heads.
llama.cpp hangs in files of plamo2 whose first layer is such a one, as it finds no rotary length;
here heads rotate whole, as in the published model.
"""

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.mamba import read_mamba_of_heads
from pyggml.models.norm import RmsNorm
from pyggml.models.rope import read_local_rope
from pyggml.ops import swiglu


def _plamo(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    return b.decoder(lambda i: b.parallel(b.attention(i), b.gated_mlp(i, swiglu)), tied=False)


def _plamo2(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", fused_qkv=True, least_heads=0)
    mamba, eps = read_mamba_of_heads(r, b.config.n_embd), b.norm("").eps

    def block(i: int) -> Part:
        h = b.heads[i]
        norms = {
            f"{x}_norm": RmsNorm(f"attn_{x}_norm", h.size, eps, heads=(n, h.size))
            for x, n in (("q", h.n), ("k", h.n_kv))
        }
        mixer = b.attention(i, **norms) if h.n_kv else mamba
        return b.sandwich_norms(mixer, b.gated_mlp(i, swiglu, fused=True), bare=True)

    return b.decoder(block)


def _plamo3(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", fused_qkv=True)
    plain = read_local_rope(r, b.rotary, b.heads[0].size)
    windows = read_windows(r, b, 8, window=0, rope=plain)

    def block(i: int) -> Part:
        attention = b.attention(i, **b.head_norms(i), **windows[i])
        return b.sandwich_norms(attention, b.gated_mlp(i, swiglu, fused=True), bare=True)

    return b.decoder(block)


PLAMO = Architecture("plamo", _plamo, {})
PLAMO2 = Architecture(
    "plamo2",
    _plamo2,
    {
        "attention.head_count": np.array([4, 0], np.int32),
        "attention.head_count_kv": np.array([2, 0], np.int32),
        "ssm.inner_size": 512,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 8,
        "ssm.group_count": 0,
        "ssm.conv_kernel": 4,
    },
)
PLAMO3 = Architecture("plamo3", _plamo3, WINDOWS)
