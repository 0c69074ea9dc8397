"""grok: Grok 1 and 2. Experts with GELUs, in Grok 2 beside a dense part; norms after both halves of
a block; capped scores. GELUs are the tanh form."""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.block import Chain, Scaled, Sum, residual
from pyggml.models.experts import MIXTURE, read_experts
from pyggml.models.rope import Rope
from pyggml.ops import geglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    usual = {
        "rope": _yarn(r, b.rotary),
        "scale": r.number("attention.output_scale", 0.08838834764831845, 1e-6, 1e3),
        "softcap": r.number("attn_logit_softcapping", 30.0, 1e-3, 1e6),
    }
    experts = read_experts(r, b, geglu)

    def block(i: int) -> Part:
        last = "layer_output_norm"
        last = last if f"blk.{i}.{last}.weight" in r.shapes else "post_ffw_norm"
        return Chain(
            (
                residual(b.norm("attn_norm"), b.attention(i, **usual), b.norm("attn_output_norm")),
                residual(b.norm("ffn_norm"), _feed_forward(r, b, i, experts[i]), b.norm(last)),
            )
        )

    return b.decoder(
        block,
        embedding_scale=r.number("embedding_scale", 78.38367176906169, -1e6, 1e6),
        logit_scale=r.number("logit_scale", 0.5773502691896257, -1e6, 1e6),
        logit_softcap=r.number("final_logit_softcapping", 0.0, 0.0, 1e6),
    )


def _feed_forward(r: Reader, b: Basics, layer: int, experts: Part) -> Part:
    if f"blk.{layer}.ffn_up.weight" not in r.shapes:
        return experts
    return Scaled(Sum((experts, b.gated_mlp(layer, geglu))), 0.5**0.5)


def _yarn(r: Reader, rope: Rope) -> Rope:
    """YaRN's factors and corners, which the file may have; an ext_factor below 0 counts as missing.
    The magnitude of the file is used where there is no ext_factor."""
    ext = r.number("rope.scaling.yarn_ext_factor", -1.0, -1e3, 1e3)
    ext = rope.ext_factor if ext < 0 else ext
    magnitude = r.number("rope.scaling.yarn_attn_factor", 1.0, 1e-3, 1e3)
    return replace(
        rope,
        ext_factor=ext,
        attn_factor=rope.attn_factor * (1.0 if ext else magnitude),
        beta_fast=r.number("rope.scaling.yarn_beta_fast", 8.0, 1e-3, 1e6),
        beta_slow=r.number("rope.scaling.yarn_beta_slow", 1.0, 1e-3, 1e6),
    )


GROK = Architecture("grok", _decoder, MIXTURE)
