"""Architectures with llama's graph: internlm2, ernie4_5 (without experts) and exaone (3, 3.5).
Rotary pairs are (2i, 2i + 1), in exaone (i, i + d/2)."""

from functools import partial

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader, rope: str) -> Decoder:
    b = read_basics(r, rope=rope)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu))

    return b.decoder(block)


INTERNLM2 = Architecture("internlm2", partial(_decoder, rope="normal"), {})
ERNIE4_5 = Architecture("ernie4_5", partial(_decoder, rope="normal"), {})
EXAONE = Architecture("exaone", partial(_decoder, rope="neox"), {})
