"""maple: Maple. As qwen3moe, with windows and rotary positions in some layers alone, and clipped
gates."""

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.experts import MIXTURE, read_experts
from pyggml.models.feed_forward import clipped_swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", own_turns=True)
    limits = r.numbers("swiglu_clamp_exp", b.config.n_layer, None, 0.0, 1e6)
    windows = read_windows(r, b, 1)
    experts = read_experts(r, b, tuple(map(clipped_swiglu, limits)))

    def block(i: int) -> Part:
        here = {"rope": None} | b.head_norms(i) | windows[i]
        return b.pre_norm(b.attention(i, **here), experts[i])

    return b.decoder(block, tied=False)


MAPLE = Architecture(
    "maple",
    _decoder,
    MIXTURE
    | {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": np.array([True, False]),
        "swiglu_clamp_exp": 7.0,
    },
)
