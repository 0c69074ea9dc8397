"""mimo2: MiMo V2 Flash. Values of another length than keys; windows and sinks in some layers, which
have heads of their own. What attention gives has a factor. Whether a layer has experts, its tensors
say."""

from dataclasses import replace

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.block import Scaled
from pyggml.models.experts import MIXTURE, dense_without_router, read_feed_forward, read_router
from pyggml.models.rope import read_local_rope
from pyggml.ops import sigmoid, swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", own_values=True)
    full = replace(b.rotary, factors=())
    windows = read_windows(r, b, 1, rope=read_local_rope(r, full, b.heads[0].size))
    router = read_router(r, 2) | {"gating": sigmoid, "normalised": True}
    feed_forward = read_feed_forward(r, b, swiglu, dense=dense_without_router(r), **router)
    factor = r.number("attention.value_scale", 0.0, -1e6, 1e6) or 1.0

    def block(i: int) -> Part:
        sinks = not r.has_tensors or f"blk.{i}.attn_sinks.weight" in r.shapes
        attention = b.attention(i, **{"rope": full, "sinks": sinks} | windows[i])
        return b.pre_norm(Scaled(attention, factor), feed_forward[i])

    return b.decoder(block, tied=False)


MIMO2 = Architecture(
    "mimo2",
    _decoder,
    {
        "attention.head_count": np.array([4, 2], np.int32),
        "attention.head_count_kv": np.array([1, 2], np.int32),
        "attention.key_length": 8,
        "attention.value_length": 4,
        "attention.value_scale": 0.7,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": np.array([False, True]),
        "rope.dimension_count": 4,
        **MIXTURE,
        "leading_dense_block_count": 1,
    },
)
