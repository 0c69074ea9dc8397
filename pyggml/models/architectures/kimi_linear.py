"""kimi-linear (Kimi Linear, arXiv:2510.26692): Kimi delta attention, and in layers whose
head_count_kv is not 0 latent attention, without rotary positions."""

from pyggml.models import latent
from pyggml.models.architecture import Architecture, Decoder, Reader
from pyggml.models.basics import read_basics
from pyggml.models.delta_net import KIMI_EXAMPLE, kimi_decoder, read_kimi_delta
from pyggml.models.experts import EXAMPLE, read_dense_first


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope=None, own_values=True, least_heads=0)
    delta, attention = read_kimi_delta(r, b), latent.read_absorbed(r, b, q_rank=0)
    feed_forward = read_dense_first(r, b, default=None, normalised=True, biased=True)
    return kimi_decoder(b, delta, attention, feed_forward, tied=False)


KIMI_LINEAR = Architecture(
    "kimi-linear", _decoder, EXAMPLE | latent.EXAMPLE | KIMI_EXAMPLE | {"expert_gating_func": 2}
)
