"""command-r and cohere2: Command R, R+, R7B, A and Aya.

Attention and feed-forward are parallel, with one norm. Norms are layer norms without biases; R+ has
them on q and k too, with a weight for each head. In cohere2, a layer has either a sliding window
and rotary positions, or neither.
"""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _command_r(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", layer_norm=("weight",))

    def block(i: int) -> Part:
        attention = b.attention(i, **b.norms_of_each_head(r, i))
        return b.parallel(attention, b.gated_mlp(i, swiglu))

    return b.decoder(block, logit_scale=_logit_scale(r))


def _cohere2(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", layer_norm=("weight",))
    window = r.count("attention.sliding_window")
    windowed = r.pattern(b.config.n_layer, 4)

    def block(i: int) -> Part:
        here = {"window": window} if windowed[i] else {"rope": None}
        return b.parallel(b.attention(i, **here), b.gated_mlp(i, swiglu))

    return b.decoder(block, logit_scale=_logit_scale(r))


def _logit_scale(r: Reader) -> float:
    """A scale of 0 means none."""
    return r.number("logit_scale", 0.0, -1e6, 1e6) or 1.0


COMMAND_R = Architecture("command-r", _command_r, {"logit_scale": 0.25})
COHERE2 = Architecture(
    "cohere2",
    _cohere2,
    {"logit_scale": 0.25, "attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
)
