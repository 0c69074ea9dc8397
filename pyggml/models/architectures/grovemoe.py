"""grovemoe: GroveMoE. As qwen3moe, with smaller experts for groups of experts."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import MOST_EXPERTS, read_experts
from pyggml.models.grove import ExpertsOfGroups, Grove
from pyggml.models.part import Part
from pyggml.ops import sigmoid, swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    experts = read_experts(r, b, swiglu, chosen_by=sigmoid)
    n, each = experts[0].n_expert, r.count("experts_per_group", most=MOST_EXPERTS)
    if n % each or experts[0].n_used > n // each:
        r.faults.append(f"{n} experts, {each} of a group: wanted as many groups as are used")
        each = 1
    small = r.count("expert_chunk_feed_forward_length", 0, least=0, most=1 << 20)
    factor = r.number("expert_group_scale", None, -1e6, 1e6)

    def block(i: int) -> Part:
        of_groups = ExpertsOfGroups(
            n_embd=b.config.n_embd,
            n_ff=small or b.heads[i].size,
            n_expert=n // each,
            n_used=min(experts[i].n_used, n // each),
            unit=swiglu,
            chosen_by=sigmoid,
            suffix="_chexps",
            each=each,
        )
        grove = Grove(experts[i], of_groups, factor)
        return b.pre_norm(b.attention(i, **b.head_norms(i)), grove)

    return b.decoder(block)


GROVEMOE = Architecture(
    "grovemoe",
    _decoder,
    {
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "expert_chunk_feed_forward_length": 128,
        "experts_per_group": 2,
        "expert_group_scale": 0.5,
    },
)
