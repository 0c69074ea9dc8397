"""spark2_5: Spark 2.5. A gate for each head of attention; windows in some layers. GELUs are the
tanh form, as in llama.cpp."""

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.attention import GatedOutput
from pyggml.models.basics import read_basics, read_windows
from pyggml.ops import geglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", own_turns=True)
    windows = read_windows(r, b, 1)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, GatedOutput, **windows[i]), b.gated_mlp(i, geglu))

    return b.decoder(block)


SPARK2_5 = Architecture(
    "spark2_5",
    _decoder,
    {"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([True, False])},
)
