"""The usual parts of an attention decoder; an architecture states only its differences."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyggml.graph.tensor import Tensor
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
from pyggml.models.rope import Rope, read_local_rope, read_rope

# Keys of a small model with windows in every other layer.
WINDOWS: dict[str, object] = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}


@dataclass(frozen=True, slots=True)
class Basics:
    """Builders of the usual parts, with a file's hyperparameters.

    `more` replaces fields of the part.
    """

    config: ModelConfig
    heads: tuple[Heads, ...]
    n_ff: tuple[int, ...]
    norm: Callable[[str], Norm]  # name -> a norm over n_embd
    rope: Rope | None
    fused_qkv: tuple[bool, ...]  # layer -> whether q, k and v come from one matrix

    @property
    def rotary(self) -> Rope:
        """The rotation of a model that has one."""
        assert self.rope is not None
        return self.rope

    def attention(self, layer: int, kind: type[Attention] = Attention, /, **more: Any) -> Attention:
        """Attention of one layer, with rotary positions if the model has any."""
        usual = {"heads": self.heads[layer], "rope": self.rope, "fused_qkv": self.fused_qkv[layer]}
        return kind(n_embd=self.config.n_embd, **usual | more)

    def head_norms(self, layer: int) -> dict[str, Norm]:
        """q_norm and k_norm for `attention`: RMS norms over each head, one weight for all heads."""
        size, eps = self.heads[layer].size, self.norm("").eps
        return {f"{x}_norm": RmsNorm(f"attn_{x}_norm", size, eps) for x in "qk"}

    def value_norm(self, layer: int) -> dict[str, Norm]:
        """v_norm for `attention`: an RMS norm over each head, without a weight."""
        size, eps = self.heads[layer].size, self.norm("").eps
        return {"v_norm": RmsNorm("attn_v_norm", size, eps, ())}

    def norms_of_all_heads(self, layer: int) -> dict[str, Norm]:
        """q_norm and k_norm for `attention`: RMS norms, each over all heads at once."""
        h, eps = self.heads[layer], self.norm("").eps
        return {
            f"{x}_norm": RmsNorm(f"attn_{x}_norm", n * h.size, eps)
            for x, n in (("q", h.n), ("k", h.n_kv))
        }

    def norms_of_each_head(self, r: Reader, layer: int) -> dict[str, Norm]:
        """q_norm and k_norm for `attention`: layer norms over each head, with a weight for each.

        Only those in the file.
        """
        h, eps = self.heads[layer], self.norm("").eps
        return {
            f"{x}_norm": LayerNorm(f"attn_{x}_norm", h.size, eps, ("weight",), n)
            for x, n in (("q", h.n), ("k", h.n_kv))
            if f"blk.{layer}.attn_{x}_norm.weight" in r.shapes
        }

    def gated_mlp(
        self, layer: int, unit: Callable[[Tensor, Tensor], Tensor], fused: bool = False
    ) -> GatedFeedForward:
        """A gated feed-forward part of one layer. fused: gate and up come from one matrix."""
        return GatedFeedForward(self.config.n_embd, self.n_ff[layer], unit, fused)

    def plain(self, layer: int, activation: Callable[[Tensor], Tensor]) -> FeedForward:
        """A feed-forward part of one layer without a gate."""
        return FeedForward(self.config.n_embd, self.n_ff[layer], activation)

    def pre_norm(
        self, attention: Part, feed_forward: Part, factor: float = 1.0, second: str = "ffn_norm"
    ) -> Part:
        """x += factor · attention(norm x), x += factor · feed_forward(norm x): the usual block.

        second: the name of the second norm.
        """
        attended = residual(self.norm("attn_norm"), attention, factor=factor)
        return Chain((attended, residual(self.norm(second), feed_forward, factor=factor)))

    def post_norm(self, attention: Part, feed_forward: Part) -> Part:
        """x += norm(attention x), x += norm(feed_forward x): norms after, and none before."""
        attended = residual(attention, self.norm("post_attention_norm"))
        return Chain((attended, residual(feed_forward, self.norm("post_ffw_norm"))))

    def parallel(
        self,
        attention: Part,
        feed_forward: Part,
        norms: tuple[str, str] = ("attn_norm", "attn_norm"),
    ) -> Part:
        """x += attention(norm_0 x) + feed_forward(norm_1 x); equal names make one norm for both."""
        if norms[0] == norms[1]:
            return residual(self.norm(norms[0]), Sum((attention, feed_forward)))
        branches = zip(norms, (attention, feed_forward), strict=True)
        return residual(Sum(tuple(Chain((self.norm(name), part)) for name, part in branches)))

    def sandwich_norms(self, attention: Part, feed_forward: Part, **after: Any) -> Part:
        """x += norm(attention(norm x)), x += norm(feed_forward(norm x)): four norms.

        after: fields of the second norm of each.
        """
        last = ("post_attention_norm", "post_ffw_norm")
        attended, fed = (replace(self.norm(name), **after) for name in last)
        return Chain(
            (
                residual(self.norm("attn_norm"), attention, attended),
                residual(self.norm("ffn_norm"), feed_forward, fed),
            )
        )

    def decoder(self, block: Callable[[int], Part], **more: Any) -> Decoder:
        """A decoder with block(i) for each layer i and output_norm; `more` replaces its fields."""
        blocks = tuple(block(i) for i in range(self.config.n_layer))
        return Decoder(
            config=self.config, blocks=blocks, **{"norm": self.norm("output_norm")} | more
        )


def read_basics(
    r: Reader,
    *,
    rope: str | None,
    layer_norm: tuple[str, ...] | None = None,
    fused_qkv: bool = False,
    least_heads: int = 1,
    least_ff: int = 1,
    windowed: tuple[bool, ...] = (),
    own_values: bool = False,
    own_turns: bool = False,
    causal: bool = True,
) -> Basics:
    """The hyperparameters of the usual parts.

    rope         "normal", "neox" or None
    layer_norm   the tensors of layer norms ("weight", "bias"); None for RMS norms
    fused_qkv    whether q, k and v come from one matrix by default; the file's tensors decide
    least_heads  0 if layers without attention are allowed
    least_ff     0 if layers without a feed-forward part are allowed
    windowed     by layer, whether it has a window and so heads of another size; none: all alike
    own_values   values may be of another size than keys, as with latent attention
    own_turns    layers with a window may rotate another number of features
    causal       where the file does not say: no token sees a later one
    """
    c = read_config(r, causal)
    heads = read_heads(r, c, least_heads, own_values, windowed)
    full = next((h for h, w in zip(heads, windowed, strict=False) if not w), heads[0])
    return Basics(
        config=c,
        heads=heads,
        n_ff=r.counts("feed_forward_length", c.n_layer, least=least_ff),
        norm=_read_norm(r, c.n_embd, layer_norm),
        rope=read_rope(r, full.size, rope, own_turns or bool(windowed)) if rope else None,
        fused_qkv=tuple(_has_fused_qkv(r, i, fused_qkv) for i in range(c.n_layer)),
    )


def _read_norm(r: Reader, n: int, layer_norm: tuple[str, ...] | None) -> Callable[[str], Norm]:
    """Name → a norm over n numbers; layer_norm: as of `read_basics`."""
    if layer_norm is None:
        return partial(RmsNorm, size=n, eps=rms_eps(r))
    return partial(LayerNorm, size=n, eps=layer_norm_eps(r), has=layer_norm)


def read_windows(
    r: Reader,
    b: Basics,
    period: int,
    *,
    window: int | None = None,
    dense_first: bool = False,
    rope: Rope | None = None,
) -> tuple[dict[str, Any], ...]:
    """For each layer, the fields of an attention with a sliding window, or none where it has none.

    Layers with a window rotate by `rope`, or as others do, but with rope.freq_base_swa and
    rope.dimension_count_swa. The file
    may have attention.sliding_window if `window` is its default, and must without.
    """
    base, scaling = b.rotary.freq_base, {x: getattr(b.rotary, x) for x in ("freq_scale", "factors")}
    here = {
        "window": r.count("attention.sliding_window", window, least=0 if window == 0 else 1),
        "rope": rope or read_local_rope(r, b.rotary, b.heads[0].size, base, **scaling),
    }
    windowed = r.pattern(b.config.n_layer, period, dense_first)
    return tuple(here if here["window"] and w else {} for w in windowed)


def _has_fused_qkv(r: Reader, layer: int, default: bool) -> bool:
    other = f"blk.{layer}.attn_{'q' if default else 'qkv'}.weight"
    return default != (other in r.shapes)
