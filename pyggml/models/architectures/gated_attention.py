"""Decoders whose attention has a gate for each head or number: afmoe (Trinity), laguna and spark2_5
(Spark 2.5)."""

import numpy as np

from pyggml.models.architecture import Architecture
from pyggml.models.attention import GatedOutput
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import SIGMOID, read_feed_forward, read_router
from pyggml.models.part import Part
from pyggml.ops import geglu, softplus, swiglu


def _afmoe(r: Reader) -> Decoder:
    """Four norms in a block; every fourth layer has no rotary positions."""
    b = read_basics(r, rope="neox")
    windows = read_windows(r, b, 4, window=0)
    router = read_router(r, SIGMOID) | {"biased": True}
    shared = _length(r) * r.count("expert_shared_count", least=0, most=64)
    feed_forward = read_feed_forward(r, b, swiglu, shared, **router)

    def block(i: int) -> Part:
        here = windows[i] | ({"rope": None} if i % 4 == 3 else {})
        attention = b.attention(i, GatedOutput, of_heads=False, **b.head_norms(i), **here)
        return b.sandwich_norms(attention, feed_forward[i])

    return b.decoder(block, embedding_scale=b.config.n_embd**0.5)


def _laguna(r: Reader) -> Decoder:
    """Gates are softplus, of heads or of numbers. Layers with a window rotate without scaling."""
    b = read_basics(r, rope="neox")
    plain = {"freq_scale": 1.0, "ext_factor": 0.0, "attn_factor": 1.0}
    windows = read_windows(r, b, 4, window=0, dense_first=True, **plain)
    router = read_router(r, SIGMOID) | {"biased": True}
    own = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    shared = own or _length(r) * r.count("expert_shared_count", 1, least=0, most=64)
    feed_forward = read_feed_forward(r, b, swiglu, shared, **router)

    def block(i: int) -> Part:
        n_rows, *_ = r.shapes.get(f"blk.{i}.attn_gate.weight", (b.heads[i].n,))
        gate = {"gate": softplus, "of_heads": n_rows == b.heads[i].n}
        attention = b.attention(i, GatedOutput, **gate, **b.head_norms(i), **windows[i])
        return b.pre_norm(attention, feed_forward[i])

    return b.decoder(block)


def _spark(r: Reader) -> Decoder:
    """GELUs are the tanh form, as in llama.cpp."""
    b = read_basics(r, rope="neox")
    windows = read_windows(r, b, 1)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, GatedOutput, **windows[i]), b.gated_mlp(i, geglu))

    return b.decoder(block)


def _length(r: Reader) -> int:
    return r.count("expert_feed_forward_length", most=1 << 20)


_WINDOWS: dict[str, object] = {
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": 2,
}
_EXPERTS: dict[str, object] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
AFMOE = Architecture("afmoe", _afmoe, _EXPERTS | _WINDOWS | {"block_count": 4})
LAGUNA = Architecture("laguna", _laguna, _EXPERTS | _WINDOWS)
SPARK2_5 = Architecture(
    "spark2_5",
    _spark,
    _WINDOWS | {"attention.sliding_window_pattern": np.array([True, False])},
)
