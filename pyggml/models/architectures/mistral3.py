"""mistral3: Ministral 3 and Mistral Small 3.1. As llama, with its own YaRN parameters, and queries
multiplied by a factor that grows with the position."""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import has_experts, read_experts
from pyggml.models.rope import Rope, read_temperature
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    rope = _yarn(r, b.rotary)
    temperature = read_temperature(r, b.rotary.n_ctx_orig)
    experts = read_experts(r, b, swiglu, own_length=False) if has_experts(r) else ()

    def block(i: int) -> Part:
        attention = b.attention(i, rope=rope, temperature=temperature)
        return b.pre_norm(attention, experts[i] if experts else b.gated_mlp(i, swiglu))

    return b.decoder(block)


def _yarn(r: Reader, rope: Rope) -> Rope:
    """The file has YaRN's corners. Its magnitude is divided, by a multiplier that the file has."""
    return replace(
        rope.divided_by_yarn(r.number("rope.scaling.yarn_log_multiplier", 0.0, 0.0, 1e3)),
        beta_fast=r.number("rope.scaling.yarn_beta_fast", 32.0, 1e-3, 1e6),
        beta_slow=r.number("rope.scaling.yarn_beta_slow", 1.0, 1e-3, 1e6),
    )


MISTRAL3 = Architecture(
    "mistral3",
    _decoder,
    {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 4},
)
