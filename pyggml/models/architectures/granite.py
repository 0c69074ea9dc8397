"""granite: as llama, with scales of embeddings, scores, residual branches and logits."""

from __future__ import annotations

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    """A scale of 0 means the usual one; `rope.scaling.finetuned` switches the rotation."""
    b = read_basics(r, rope="normal")
    here = {"scale": r.number("attention.scale", 0.0, 0.0, 1e6)}
    rotated = {} if r.flag("rope.scaling.finetuned", True) else {"rope": None}
    factor = r.number("residual_scale", 0.0, -1e6, 1e6) or 1.0

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **here, **rotated), b.gated(i, swiglu), factor)

    return b.decoder(
        block,
        embedding_scale=r.number("embedding_scale", 0.0, -1e6, 1e6) or 1.0,
        logit_scale=1 / r.number("logit_scale", None, 1e-6, 1e6),
    )


GRANITE = Architecture(
    "granite",
    _decoder,
    {"attention.scale": 0.1, "residual_scale": 0.5, "embedding_scale": 4.0, "logit_scale": 2.0},
)
