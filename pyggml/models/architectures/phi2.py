"""phi2: Phi 1 to 2. Attention and feed-forward are parallel, with one norm; biases everywhere."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import gelu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight", "bias"))

    def block(i: int) -> Part:
        return b.parallel(b.attention(i), b.plain(i, gelu))

    return b.decoder(block, tied=False)


PHI2 = Architecture("phi2", _decoder, {"rope.dimension_count": 2})
