"""afmoe: Trinity. Four norms in a block; a gate for each number of attention; experts beside a
shared one in all layers but the first few. Every fourth layer has no rotary positions."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.attention import GatedOutput
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.experts import (
    EXAMPLE,
    SIGMOID,
    read_counted_length,
    read_feed_forward,
    read_router,
)
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    windows = read_windows(r, b, 4, window=0)
    router = read_router(r, SIGMOID) | {"biased": True}
    feed_forward = read_feed_forward(r, b, swiglu, read_counted_length(r), **router)

    def block(i: int) -> Part:
        here = windows[i] | ({"rope": None} if i % 4 == 3 else {})
        attention = b.attention(i, GatedOutput, of_heads=False, **b.head_norms(i), **here)
        return b.sandwich_norms(attention, feed_forward[i])

    return b.decoder(block, embedding_scale=b.config.n_embd**0.5)


AFMOE = Architecture("afmoe", _decoder, EXAMPLE | WINDOWS | {"block_count": 4})
