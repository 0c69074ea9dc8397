"""What most decoders read and are made of, so that an architecture says only where it differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyggml.models.attention import Attention
from pyggml.models.block import Chain, Sum, residual
from pyggml.models.config import (
    Heads,
    ModelConfig,
    Reader,
    layer_norm_eps,
    read_config,
    read_heads,
    rms_eps,
)
from pyggml.models.decoder import Decoder
from pyggml.models.feed_forward import FeedForward, GatedFeedForward
from pyggml.models.norm import LayerNorm, Norm, RmsNorm
from pyggml.models.part import Part
from pyggml.models.rope import Rope, read_rope
from pyggml.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Basics:
    """The parts of an attention decoder, sized by a file's hyperparameters.

    `more` are fields of the part that differ from what is usual.
    """

    config: ModelConfig
    heads: tuple[Heads, ...]
    n_ff: tuple[int, ...]
    norm: Callable[[str], Norm]  # name -> a norm over n_embd
    rope: Rope | None
    packed: tuple[bool, ...]  # layer -> whether the file has one matrix for q, k and v

    def attention(self, layer: int, kind: type[Attention] = Attention, /, **more: Any) -> Attention:
        """Attention of one layer, with rotary positions if the model has any."""
        usual = {"heads": self.heads[layer], "rope": self.rope, "packed": self.packed[layer]}
        return kind(n_embd=self.config.n_embd, **usual | more)

    def head_norms(self, layer: int) -> dict[str, Norm]:
        """q_norm and k_norm for `attention`: RMS norms over each head."""
        size, eps = self.heads[layer].size, self.norm("").eps
        return {f"{x}_norm": RmsNorm(f"attn_{x}_norm", size, eps) for x in "qk"}

    def norms_of_each_head(self, r: Reader, layer: int) -> dict[str, Norm]:
        """q_norm and k_norm for `attention`: layer norms with weights for each head, if any."""
        h, eps = self.heads[layer], self.norm("").eps
        return {
            f"{x}_norm": LayerNorm(f"attn_{x}_norm", h.size, eps, ("weight",), n)
            for x, n in (("q", h.n), ("k", h.n_kv))
            if f"blk.{layer}.attn_{x}_norm.weight" in r.shapes
        }

    def gated(
        self, layer: int, unit: Callable[[Tensor, Tensor], Tensor], packed: bool = False
    ) -> GatedFeedForward:
        """A gated feed-forward part of one layer."""
        return GatedFeedForward(self.config.n_embd, self.n_ff[layer], unit, packed)

    def plain(self, layer: int, activation: Callable[[Tensor], Tensor]) -> FeedForward:
        """A feed-forward part of one layer without a gate."""
        return FeedForward(self.config.n_embd, self.n_ff[layer], activation)

    def pre_norm(self, attention: Part, feed_forward: Part, factor: float = 1.0) -> Part:
        """x += factor · attention(norm x), x += factor · feed_forward(norm x): the usual block."""
        return Chain(
            (
                residual(self.norm("attn_norm"), attention, factor=factor),
                residual(self.norm("ffn_norm"), feed_forward, factor=factor),
            )
        )

    def parallel(
        self,
        attention: Part,
        feed_forward: Part,
        norms: tuple[str, str] = ("attn_norm", "attn_norm"),
    ) -> Part:
        """x += attention(norm x) + feed_forward(norm x); `norms` of the two, one if they agree."""
        if norms[0] == norms[1]:
            return residual(self.norm(norms[0]), Sum((attention, feed_forward)))
        branches = zip(norms, (attention, feed_forward), strict=True)
        return residual(Sum(tuple(Chain((self.norm(name), part)) for name, part in branches)))

    def sandwiched(self, attention: Part, feed_forward: Part) -> Part:
        """The usual block with a norm behind each of its two parts as well."""
        n = self.norm
        return Chain(
            (
                residual(n("attn_norm"), attention, n("post_attention_norm")),
                residual(n("ffn_norm"), feed_forward, n("post_ffw_norm")),
            )
        )

    def decoder(self, block: Callable[[int], Part], **more: Any) -> Decoder:
        """Blocks made from their numbers, between embedding and last norm."""
        blocks = tuple(block(i) for i in range(self.config.n_layer))
        return Decoder(
            config=self.config, blocks=blocks, **{"norm": self.norm("output_norm")} | more
        )


def read_basics(
    r: Reader,
    *,
    rope: str | None,
    layer_norm: tuple[str, ...] | None = None,
    packed: bool = False,
    least_heads: int = 1,
) -> Basics:
    """What a file says of the usual parts.

    rope         "normal", "neox" or None
    layer_norm   the tensors that layer norms have, None for RMS norms
    packed       q, k and v are expected in one matrix; a file that has it the other way is obeyed
    least_heads  0 where a layer may be without attention
    """
    c = read_config(r)
    heads = read_heads(r, c, least_heads)
    norm: Callable[[str], Norm]
    if layer_norm is None:
        norm = partial(RmsNorm, size=c.n_embd, eps=rms_eps(r))
    else:
        norm = partial(LayerNorm, size=c.n_embd, eps=layer_norm_eps(r), has=layer_norm)
    return Basics(
        config=c,
        heads=heads,
        n_ff=r.counts("feed_forward_length", c.n_layer),
        norm=norm,
        rope=read_rope(r, heads[0].size, rope) if rope else None,
        packed=tuple(_is_packed(r, i, packed) for i in range(c.n_layer)),
    )


def _is_packed(r: Reader, layer: int, usual: bool) -> bool:
    other = f"blk.{layer}.attn_{'q' if usual else 'qkv'}.weight"
    return usual != (other in r.shapes)
