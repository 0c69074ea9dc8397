"""bailingmoe3 (Ling 3): Kimi's delta attention, and in layers whose head_count_kv is not 0 latent
attention with a gate of each head; after the first layers, experts beside a shared one. Rotary
pairs of files with sections, whose text it is, are those of "neox"."""

from pyggml.models import latent
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.delta_net import KIMI_EXAMPLE, kimi_decoder, read_kimi_delta
from pyggml.models.experts import EXAMPLE, read_feed_forward, read_router
from pyggml.models.feed_forward import read_clips
from pyggml.models.rope import check_sections


def _decoder(r: Reader) -> Decoder:
    time, height, *_ = r.counts("rope.dimension_sections", 4, (0,) * 4, least=0, most=1 << 12)
    by_sections = bool(time and height)
    mode = "neox" if by_sections else "normal"
    b = read_basics(r, rope=mode, own_values=True, least_heads=0)
    if by_sections and b.rope:
        check_sections(r, b.rope)
    if not r.flag("kda.safe_gate", True):
        r.faults.append("bailingmoe3.kda.safe_gate is False, wanted True")
    least = r.number("kda.gate_lower_bound", None, -1e3, -1e-6)
    delta = read_kimi_delta(r, b, low_rank=False, least=least)
    q_rank = r.count("attention.q_lora_rank", 0, least=0, most=1 << 14)
    attention = latent.read_absorbed(r, b, q_rank=q_rank, gated=True)
    return kimi_decoder(b, delta, attention, _feed_forward(r, b))


def _feed_forward(r: Reader, b: Basics) -> tuple[Part, ...]:
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    n_shared = max(1, r.count("expert_shared_count", least=0, most=64))
    own = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    of_experts, of_others = read_clips(r, b.config.n_blocks)
    return read_feed_forward(
        *(r, b, of_experts, own or n_ff * n_shared),
        own_units=of_others,
        **read_router(r) | {"biased": True},
    )


BAILINGMOE3 = Architecture(
    "bailingmoe3",
    _decoder,
    EXAMPLE
    | latent.EXAMPLE
    | KIMI_EXAMPLE
    | {"expert_gating_func": 2, "kda.gate_lower_bound": -5.0},
)
