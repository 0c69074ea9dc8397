"""apertus: Apertus. As llama, with norms of each head of q and k, and xIELU instead of a gate.
Biases of these norms are passed over, as in llama.cpp."""

from functools import partial

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.ops import xielu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    scale = r.number("attention.scale", 0.0, 0.0, 1e6)
    names = ("alpha_n", "alpha_p", "beta", "eps")
    numbers = [r.numbers(f"xielu.{x}", b.config.n_layer, None, -1e6, 1e6) for x in names]

    def block(i: int) -> Part:
        alpha_n, alpha_p, beta, eps = (of_layers[i] for of_layers in numbers)
        unit = partial(xielu, alpha_n=alpha_n, alpha_p=alpha_p, beta=beta, eps=eps)
        attention = b.attention(i, scale=scale, **b.head_norms(i))
        return b.pre_norm(attention, b.plain(i, unit))

    return b.decoder(block, tied=False, unread=("attn_q_norm.bias", "attn_k_norm.bias"))


APERTUS = Architecture(
    "apertus",
    _decoder,
    {"xielu.alpha_n": 0.8, "xielu.alpha_p": 0.8, "xielu.beta": 0.5, "xielu.eps": -1e-6},
)
