"""llama4: Llama 4 (text). Experts in every interleave_moe_layer_step-th layer beside a shared one,
weighed by sigmoids before their products. Every fourth layer has no rotary positions; its queries
are multiplied by a factor that grows with the position. The others see the keys of their own chunk
and have norms of q and k without weights, after rope; models of 128 experts have none.

The chunks' length is llama.cpp's, whatever the file has; it aborts where the file has 0.
"""

from dataclasses import replace
from typing import Any

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import MIXTURE, read_feed_forward
from pyggml.models.norm import RmsNorm
from pyggml.models.rope import Temperature
from pyggml.ops import sigmoid, swiglu

CHUNK, PERIOD, WITHOUT_NORMS = 8192, 4, 128
_ROUTER: dict[str, Any] = {
    "gating": sigmoid,
    "chosen_by": lambda logits: logits,
    "normalised": False,
    "first": True,
}


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    r.count("attention.sliding_window", CHUNK)
    step = r.count("interleave_moe_layer_step", least=0, most=1024)
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    feed_forward = read_feed_forward(
        r, b, swiglu, n_ff, lambda i: not step or (i + 1) % step > 0, **_ROUTER
    )
    base = r.number("rope.freq_base_swa", b.rotary.freq_base, 1.0, 1e12)
    local = {"chunk": CHUNK, "rope": replace(b.rotary, freq_base=base)}
    chunked = r.pattern(b.config.n_layer, PERIOD)
    far = {"rope": None, "temperature": Temperature(0.1, CHUNK, first=1)}
    has_norms = r.count("expert_count", most=512) != WITHOUT_NORMS

    def block(i: int) -> Part:
        here = local if chunked[i] else {}
        if (i + 1) % PERIOD == 0:
            here = here | far
        elif has_norms:
            size, eps = b.heads[i].size, b.norm("").eps
            norms = {f"{x}_norm": RmsNorm(f"attn_{x}_norm", size, eps, ()) for x in "qk"}
            here = here | norms | {"norms_last": True}
        return b.pre_norm(b.attention(i, **here), feed_forward[i])

    return b.decoder(block)


LLAMA4 = Architecture(
    "llama4", _decoder, MIXTURE | {"interleave_moe_layer_step": 2, "block_count": 4}
)
