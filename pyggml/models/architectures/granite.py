"""granite, granitemoe and minicpm. As llama, with factors of embeddings, scores, residual branches
and logits. Any may have experts, some beside a shared expert; published files of granite and
minicpm have none."""

from collections.abc import Sequence
from dataclasses import replace

from pyggml.models.architecture import Architecture
from pyggml.models.basics import Basics, read_basics
from pyggml.models.block import Sum
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import has_experts, read_experts, read_shared
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _granite(r: Reader) -> Decoder:
    """`rope.scaling.finetuned` false: no rotary positions."""
    b = read_basics(r, rope="normal")
    rope = b.rope if r.flag("rope.scaling.finetuned", True) else None
    return _decoder(r, replace(b, rope=rope))


def _granitemoe(r: Reader) -> Decoder:
    return _decoder(r, read_basics(r, rope="normal"))


def _minicpm(r: Reader) -> Decoder:
    """Files of older converters lack the factors."""
    b = read_basics(r, rope="normal")
    n_embd, n_layer = b.config.n_embd, b.config.n_layer
    return _decoder(r, b, embedding=12.0, residual=1.4 / n_layer**0.5, logit=256.0 / n_embd)


def _feed_forward(r: Reader, b: Basics) -> Sequence[Part]:
    if not has_experts(r):
        return [b.gated_mlp(i, swiglu) for i in range(b.config.n_layer)]
    shared = read_shared(r, b, swiglu)
    experts = read_experts(r, b, swiglu, own_length=False)
    return [Sum((e, shared)) if shared else e for e in experts]


def _decoder(
    r: Reader,
    b: Basics,
    embedding: float = 0.0,
    residual: float = 0.0,
    logit: float | None = None,
) -> Decoder:
    """A factor of 0 means none."""
    scale = r.number("attention.scale", 0.0, 0.0, 1e6)
    factor = r.number("residual_scale", residual, -1e6, 1e6) or 1.0
    feed_forward = _feed_forward(r, b)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, scale=scale), feed_forward[i], factor)

    return b.decoder(
        block,
        embedding_scale=r.number("embedding_scale", embedding, -1e6, 1e6) or 1.0,
        logit_scale=1 / r.number("logit_scale", logit, 1e-6, 1e6),
    )


_SCALES = {
    "attention.scale": 0.1,
    "residual_scale": 0.5,
    "embedding_scale": 4.0,
    "logit_scale": 2.0,
}

GRANITE = Architecture("granite", _granite, _SCALES)
GRANITEMOE = Architecture(
    "granitemoe",
    _granitemoe,
    _SCALES | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 256},
)
MINICPM = Architecture("minicpm", _minicpm, {})
