"""arcee: as llama, with a squared ReLU instead of a gate."""

from __future__ import annotations

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import relu, sqr
from pyggml.tensor import Tensor


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.plain(i, _relu_squared))

    return b.decoder(block)


def _relu_squared(x: Tensor) -> Tensor:
    return sqr(relu(x))


ARCEE = Architecture("arcee", _decoder, {})
