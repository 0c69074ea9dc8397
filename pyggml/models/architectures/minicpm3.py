"""minicpm3 (MiniCPM 3) and plm (PLM): latent attention with whole heads, dense feed-forward parts.

minicpm3  the factors of its embeddings, residual branches and logits are llama.cpp's, for the one
          model there is
plm       its output matrix is always the token embedding
"""

from math import sqrt

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.latent import read_latent
from pyggml.ops import relu, sqr, swiglu


def _minicpm3(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", own_values=True)
    attention = read_latent(r, b, q_rank=r.count("attention.q_lora_rank", most=1 << 14))
    factor = 1.4 / sqrt(b.config.n_layer)

    def block(i: int) -> Part:
        return b.pre_norm(attention, b.gated_mlp(i, swiglu), factor)

    return b.decoder(block, embedding_scale=12.0, logit_scale=256 / b.config.n_embd)


def _plm(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", own_values=True)
    attention = read_latent(r, b, q_rank=0)
    return b.decoder(lambda i: b.pre_norm(attention, b.plain(i, lambda x: sqr(relu(x)))))


_WHOLE: dict[str, object] = {
    "attention.head_count_kv": 4,
    "attention.kv_lora_rank": 8,
    "attention.key_length": 10,
    "attention.value_length": 6,
    "rope.dimension_count": 4,
}
MINICPM3 = Architecture("minicpm3", _minicpm3, _WHOLE | {"attention.q_lora_rank": 12})
PLM = Architecture("plm", _plm, _WHOLE)
