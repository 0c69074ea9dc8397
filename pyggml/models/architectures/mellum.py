"""mellum: Mellum 2. As qwen3moe, with windows in some layers; these rotate as if the file had no
scaling."""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.experts import MIXTURE, read_experts
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    experts = read_experts(r, b, swiglu)
    plain = replace(b.rotary, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
    windows = read_windows(r, b, 4, window=0, rope=plain)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i), **windows[i]), experts[i])

    return b.decoder(block, tied=False)


MELLUM = Architecture("mellum", _decoder, MIXTURE | WINDOWS)
