"""exaone4 (EXAONE 4) and exaone-moe (K-EXAONE). Norms of each head of q and k.

exaone4 has norms after attention and feed-forward instead of before. Its 32B, recognised by its 64
layers, has windows, and rotates in layers with a window alone; so does exaone-moe.
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.experts import MIXTURE, read_feed_forward, read_router
from pyggml.ops import swiglu

N_LAYER_32B = 64


def _exaone4(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    window = r.count("attention.sliding_window", 4096)
    has_windows = b.config.n_layer == N_LAYER_32B
    windowed = r.pattern(b.config.n_layer, 4)

    def block(i: int) -> Part:
        here = {"window": window} if windowed[i] else {"rope": None}
        attention = b.attention(i, **b.head_norms(i), **here if has_windows else {})
        return b.post_norm(attention, b.gated_mlp(i, swiglu))

    return b.decoder(block)


def _exaone_moe(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    windows = read_windows(r, b, 4, rope=b.rope)
    shared = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    shared = shared or r.count("expert_feed_forward_length", most=1 << 20)
    feed_forward = read_feed_forward(r, b, swiglu, shared, **read_router(r))

    def block(i: int) -> Part:
        here = windows[i] or {"rope": None}
        return b.pre_norm(b.attention(i, **b.head_norms(i), **here), feed_forward[i])

    return b.decoder(block, tied=False)


EXAONE4 = Architecture("exaone4", _exaone4, {})
EXAONE_MOE = Architecture(
    "exaone-moe",
    _exaone_moe,
    {
        **WINDOWS,
        **MIXTURE,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
    },
)
