"""modern-bert, neo-bert and eurobert: encoders with a norm before each part and rotary positions.

modern-bert sees half of a window's tokens on either side, but in the first of every three layers
all. eurobert is a llama that sees both ways.
"""

from functools import partial

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.block import Chain, residual
from pyggml.models.classifier import read_classifier
from pyggml.models.rope import read_local_rope
from pyggml.ops import geglu, gelu, swiglu

_UNITS = {"silu": swiglu, "swiglu": swiglu, "gelu": geglu, "geglu": geglu}


def _modern_bert(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight",), fused_qkv=True, causal=False)
    local = read_local_rope(r, b.rotary, b.heads[0].size)
    windows = read_windows(r, b, 3, window=0, dense_first=True, rope=local)
    unit = _UNITS[r.word("hidden_activation", "gelu", tuple(_UNITS))]

    def block(i: int) -> Part:
        attention = b.attention(i, **windows[i], symmetric=True)
        feed_forward = residual(b.norm("ffn_norm"), b.gated_mlp(i, unit, True))
        has_norm = i > 0 or "blk.0.attn_norm.weight" in r.shapes
        norms = (b.norm("attn_norm"),) if has_norm else ()
        return Chain((residual(*norms, attention), feed_forward))

    eps = b.norm("").eps
    classifier = read_classifier(r, b.config, activation=gelu, mean=True, eps=eps)
    first = b.norm("token_embd_norm")
    return b.decoder(block, prelude=first, has_output=False, classifier=classifier)


def _pre_norm(r: Reader, rope: str, fused: bool, norm: str) -> Decoder:
    """fused: q, k and v are one matrix, and so are gate and up. norm: the last one's name."""
    b = read_basics(r, rope=rope, fused_qkv=fused, causal=False)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu, fused))

    classifier = read_classifier(r, b.config) if fused else None
    return b.decoder(block, norm=b.norm(norm), has_output=False, classifier=classifier)


_HEADS: dict[str, object] = {"attention.head_count_kv": 4}
_WINDOW: dict[str, object] = {"attention.sliding_window": 8, "block_count": 3}
MODERN_BERT = Architecture("modern-bert", _modern_bert, _HEADS | _WINDOW, embeds=True)
NEO_BERT = Architecture(
    "neo-bert",
    partial(_pre_norm, rope="normal", fused=True, norm="enc.output_norm"),
    _HEADS,
    embeds=True,
)
EUROBERT = Architecture(
    "eurobert", partial(_pre_norm, rope="neox", fused=False, norm="output_norm"), {}, embeds=True
)
