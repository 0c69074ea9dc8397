"""qwen3 and qwen3moe. As qwen2, without biases and with an RMS norm of each head of q and k before
rope. qwen3moe has experts in every layer.

qwen3vl and qwen3vlmoe are the text of their models. qwen3 and qwen3vl may have a classifier: the
rows of "yes" and "no" of a reranker, whose score is the probability of the first.
"""

from functools import partial

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.classifier import read_classifier
from pyggml.models.experts import MIXTURE, read_experts
from pyggml.models.rope import check_sections
from pyggml.ops import swiglu


def _decoder(r: Reader, sections: bool = False) -> Decoder:
    b = read_basics(r, rope="neox")
    if sections and b.rope:
        check_sections(r, b.rope, interleaved=True)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), b.gated_mlp(i, swiglu))

    return b.decoder(block, classifier=read_classifier(r, b.config, softmax=True))


def _with_experts(r: Reader, sections: bool = False) -> Decoder:
    b = read_basics(r, rope="neox")
    if sections and b.rope:
        check_sections(r, b.rope, interleaved=True)
    experts = read_experts(r, b, swiglu)

    return b.decoder(lambda i: b.pre_norm(b.attention(i, **b.head_norms(i)), experts[i]))


_SECTIONS: dict[str, object] = {"rope.dimension_sections": np.array([4, 4, 4, 0], np.int32)}
QWEN3 = Architecture("qwen3", _decoder, {})
QWEN3MOE = Architecture("qwen3moe", _with_experts, MIXTURE)
QWEN3VL = Architecture(
    "qwen3vl", partial(_decoder, sections=True), _SECTIONS | {"rope.dimension_count": 4}
)
QWEN3VLMOE = Architecture(
    "qwen3vlmoe",
    partial(_with_experts, sections=True),
    MIXTURE | _SECTIONS | {"rope.dimension_count": 4},
)
