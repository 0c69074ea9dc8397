"""command-r: Command R, R+ and Aya. Attention and feed-forward see the same normalised x.

Norms are layer norms without biases. R+ has them on q and k too, with weights for each head.
"""

from __future__ import annotations

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", layer_norm=("weight",))

    def block(i: int) -> Part:
        attention = b.attention(i, **b.norms_of_each_head(r, i))
        return b.parallel(attention, b.gated(i, swiglu))

    return b.decoder(block, logit_scale=r.number("logit_scale", 0.0, -1e6, 1e6) or 1.0)


COMMAND_R = Architecture("command-r", _decoder, {"logit_scale": 0.25})
