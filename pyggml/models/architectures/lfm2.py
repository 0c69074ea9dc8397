"""lfm2: LFM 2. Most blocks mix tokens by a gated short convolution, the others by attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.recurrent import CausalConv
from pyggml.models.weights import Tensors, matrix, merged
from pyggml.ops import mul, split, swiglu
from pyggml.tensor import Shape, Tensor


@dataclass(frozen=True, slots=True)
class ShortConv(Part):
    """out_proj(c · conv(b · x)), where b, c and x are the thirds of in_proj(x)."""

    n_embd: int
    width: int

    @property
    def _conv(self) -> CausalConv:
        return CausalConv("shortconv.conv", self.n_embd, self.width, bias=False)

    def tensors(self, at: str) -> Tensors:
        n = self.n_embd
        return merged(
            [
                matrix(f"{at}shortconv.in_proj", 3 * n, n, bias=False),
                self._conv.tensors(at),
                matrix(f"{at}shortconv.out_proj", n, n, bias=False),
            ]
        )

    def state(self, at: str, n_ctx: int) -> Mapping[str, Shape]:
        return self._conv.state(at, n_ctx)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        b, c, x = split(net.linear(f"{at}shortconv.in_proj", x), (self.n_embd,) * 3)
        return net.linear(f"{at}shortconv.out_proj", mul(c, self._conv(net, at, mul(b, x))))


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", least_heads=0)
    conv = ShortConv(b.config.n_embd, r.count("shortconv.l_cache", least=2, most=64))
    window = r.count("attention.sliding_window", 0, least=0)

    def block(i: int) -> Part:
        if not b.heads[i].n_kv:
            return b.pre_norm(conv, b.gated(i, swiglu))
        return b.pre_norm(b.attention(i, window=window, **b.head_norms(i)), b.gated(i, swiglu))

    # llama.cpp calls the last norm after the embedding, as Hugging Face's class does.
    return b.decoder(block, norm=replace(b.norm(""), name="token_embd_norm"))


LFM2 = Architecture(
    "lfm2",
    _decoder,
    {"shortconv.l_cache": 3, "attention.head_count_kv": np.array([0, 2], np.int32)},
)
