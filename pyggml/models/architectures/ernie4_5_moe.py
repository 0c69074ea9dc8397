"""ernie4_5-moe: ERNIE 4.5 with experts in all layers but the first few. The bias of attn_output is
passed over, as in llama.cpp. An interleave_moe_layer_step above 1 is refused: llama.cpp reads no
matrices for the layers between."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import MIXTURE, read_feed_forward
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    r.count("interleave_moe_layer_step", most=1)
    shared = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    feed_forward = read_feed_forward(r, b, swiglu, shared, biased=None)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), feed_forward[i])

    return b.decoder(block, unread=("attn_output.bias",))


ERNIE4_5_MOE = Architecture(
    "ernie4_5-moe",
    _decoder,
    MIXTURE
    | {
        "expert_shared_feed_forward_length": 256,
        "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1,
    },
)
