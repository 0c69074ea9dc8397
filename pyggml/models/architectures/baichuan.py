"""baichuan: Baichuan 7B and 13B. As llama; the 13B, recognised by its 40 layers, has ALiBi instead
of rotary positions."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu

N_LAYER_13B = 40


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    positions = {"rope": None, "max_bias": 8.0} if b.config.n_layer == N_LAYER_13B else {}

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **positions), b.gated_mlp(i, swiglu))

    return b.decoder(block, tied=False)


BAICHUAN = Architecture("baichuan", _decoder, {})
