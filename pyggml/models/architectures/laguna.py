"""laguna: Laguna. Gates of attention are softplus, of heads or of numbers; experts beside a shared
one in all layers but the first few. Layers with a window rotate as if the file had no scaling."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.attention import GatedOutput
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.experts import EXAMPLE, SIGMOID, read_feed_forward, read_router
from pyggml.models.rope import read_local_rope
from pyggml.ops import softplus, swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", own_turns=True)
    size, unscaled = b.heads[0].size, {"ext_factor": 0.0, "attn_factor": 1.0}
    plain = read_local_rope(r, b.rotary, size, b.rotary.freq_base, **unscaled)
    windows = read_windows(r, b, 4, window=0, dense_first=True, rope=plain)
    router = read_router(r, SIGMOID) | {"biased": True}
    own = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    shared = own or n_ff * r.count("expert_shared_count", 1, least=0, most=64)
    feed_forward = read_feed_forward(r, b, swiglu, shared, **router)

    def block(i: int) -> Part:
        n_rows, *_ = r.shapes.get(f"blk.{i}.attn_gate.weight", (b.heads[i].n,))
        gate = {"gate": softplus, "of_heads": n_rows == b.heads[i].n}
        attention = b.attention(i, GatedOutput, **gate, **b.head_norms(i), **windows[i])
        return b.pre_norm(attention, feed_forward[i])

    return b.decoder(block)


LAGUNA = Architecture("laguna", _decoder, EXAMPLE | WINDOWS)
