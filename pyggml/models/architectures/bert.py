"""bert, nomic-bert, nomic-bert-moe, jina-bert-v2 and jina-bert-v3: encoders whose norms follow each
sum.

bert has learned positions, jina-bert-v2 ALiBi's, the others rotary ones. Every token is of the
first sentence: row 0 of token_types. GELUs are the tanh form, as in llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.block import Chain, Residual, residual
from pyggml.models.classifier import read_classifier
from pyggml.models.experts import read_experts
from pyggml.models.net import Net
from pyggml.models.weights import Tensors, TensorSpec
from pyggml.ops import add, geglu, gelu, narrow, swiglu


@dataclass(frozen=True, slots=True)
class TokenType(Part):
    """x + the embedding of the first of n_types token types; x if the file has none."""

    n_embd: int
    n_types: int

    branch = ""

    def tensors(self, at: str) -> Tensors:
        shape = self.n_types, self.n_embd
        return {"token_types.weight": TensorSpec(shape, optional=True, unpacked=True)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        types = net.weights.get("token_types.weight")
        return x if types is None else add(x, narrow(types, 0, 0, 1))


Feed = Callable[[Reader, Basics, int], Part]


def _gelu(r: Reader, b: Basics, layer: int) -> Part:
    return b.plain(layer, gelu)


def _swiglu(r: Reader, b: Basics, layer: int) -> Part:
    return b.gated_mlp(layer, swiglu)


def _geglu(r: Reader, b: Basics, layer: int) -> Part:
    """The gate is a matrix of its own, or the first rows of ffn_up, or there is none."""
    if f"blk.{layer}.ffn_gate.weight" in r.shapes:
        return b.gated_mlp(layer, geglu)
    n_up = r.shapes.get(f"blk.{layer}.ffn_up.weight", (2 * b.n_ff[layer],))[0]
    return b.plain(layer, gelu) if n_up == b.n_ff[layer] else b.gated_mlp(layer, geglu, True)


def _some_experts(r: Reader, b: Basics, layer: int) -> Part:
    """Experts in the second of every few layers."""
    period = r.count("moe_every_n_layers", 0, least=0, most=1024)
    if not period or layer % period != 1:
        return b.plain(layer, gelu)
    experts = read_experts(r, b, gelu, own_length=False, gated=False, normalised=False)
    return experts[layer]


def _attention(r: Reader, b: Basics, layer: int, max_bias: float) -> Part:
    """The sum with attention and its norm; some of Jina's have a second sum with a norm."""
    at, n = f"blk.{layer}.", b.config.n_embd
    norms = {
        f"{x}_norm": replace(b.norm(f"attn_{x}_norm"), size=n)
        for x in "qk"
        if f"{at}attn_{x}_norm.weight" in r.shapes
    }
    first = b.attention(layer, max_bias=max_bias, **norms)
    normed = residual(first), b.norm("attn_output_norm")
    if f"{at}attn_norm_2.weight" not in r.shapes:
        return Chain(normed)
    return Chain((Residual(Chain(normed)), b.norm("attn_norm_2")))


def _encoder(
    r: Reader, feed: Feed, *, rope: str | None = None, positions: bool = False, max_bias: float = 0
) -> Decoder:
    b = read_basics(r, rope=rope, layer_norm=("weight", "bias"), causal=False)

    def block(i: int) -> Part:
        feed_forward = residual(feed(r, b, i)), b.norm("layer_output_norm")
        return Chain((_attention(r, b, i, max_bias), *feed_forward))

    c = b.config
    n_types = r.shapes.get("token_types.weight", (2,))[0]
    more: dict[str, Any] = {
        "norm": None,
        "prelude": Chain((TokenType(c.n_embd, n_types), b.norm("token_embd_norm"))),
        "n_positions": c.n_ctx if positions else 0,
        "classifier": read_classifier(r, c),
    }
    return b.decoder(block, has_output=False, **more)


def _row(
    name: str, feed: Feed, example: dict[str, object] | None = None, **more: Any
) -> Architecture:
    heads: dict[str, object] = {"attention.head_count_kv": 4}
    return Architecture(
        name, partial(_encoder, feed=feed, **more), heads | (example or {}), embeds=True
    )


_MOE: dict[str, object] = {"moe_every_n_layers": 2, "expert_count": 4, "expert_used_count": 2}
ROWS = (
    _row("bert", _gelu, positions=True),
    _row("nomic-bert", _swiglu, rope="neox"),
    _row("nomic-bert-moe", _some_experts, _MOE, rope="neox"),
    _row("jina-bert-v2", _geglu, max_bias=8.0),
    _row("jina-bert-v3", _gelu, rope="neox"),
)
