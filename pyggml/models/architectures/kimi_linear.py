"""kimi-linear (Kimi Linear, arXiv:2510.26692): Kimi delta attention, and in layers whose
head_count_kv is not 0 latent attention, without rotary positions."""

import numpy as np

from pyggml.models.architecture import Architecture
from pyggml.models.architectures.deepseek2 import EXPERTS, LATENT, read_dense_first
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader, rms_eps
from pyggml.models.decoder import Decoder
from pyggml.models.delta_net import KimiDelta
from pyggml.models.latent import read_absorbed
from pyggml.models.part import Part


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope=None, own_values=True, least_heads=0)
    delta = KimiDelta(
        n_embd=b.config.n_embd,
        n_head=b.heads[0].n,
        size=r.count("kda.head_dim", most=1 << 12),
        width=r.count("ssm.conv_kernel", least=2, most=64),
        eps=rms_eps(r),
    )
    latent = read_absorbed(r, b, q_rank=0)
    feed_forward = read_dense_first(r, b, default=None, normalised=True, biased=True)

    def block(i: int) -> Part:
        return b.pre_norm(latent if b.heads[i].n_kv else delta, feed_forward[i])

    return b.decoder(block, tied=False, adapts_output=False)


KIMI_LINEAR = Architecture(
    "kimi-linear",
    _decoder,
    EXPERTS
    | LATENT
    | {
        "attention.head_count_kv": np.array([0, 1], np.int32),
        "expert_gating_func": 2,
        "kda.head_dim": 8,
        "ssm.conv_kernel": 4,
    },
)
