"""nanbeige: Nanbeige 4.1. As llama; all layers may run several times over, with the last norm
between, each time with keys of their own."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.ops import swiglu

MOST_LAYERS = 512  # of all turns, llama.cpp's LLAMA_MAX_LAYERS


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    n_turns = r.count("num_loops", 1, most=max(MOST_LAYERS // b.config.n_layer, 1))
    bare = r.flag("skip_loop_final_norm", False)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu))

    return b.decoder(block, n_turns=n_turns, between=None if bare else b.norm("output_norm"))


NANBEIGE = Architecture("nanbeige", _decoder, {"num_loops": 2})
