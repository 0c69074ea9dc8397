"""smallthinker: SmallThinker. Experts are chosen by the input of a layer, before attention; their
gates are ReLUs. Layers without rotary positions, every fourth, have no window where others have."""

from dataclasses import dataclass

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.block import named_branch, residual
from pyggml.models.experts import Experts, read_experts, read_gating
from pyggml.models.net import Net
from pyggml.models.norm import Norm
from pyggml.ops import add, reglu

WINDOW = 4096  # llama.cpp's, whatever the file has
PERIOD = 4


@dataclass(frozen=True, slots=True)
class _Block(Part):
    """y = attention(x), y + experts(norm(y)), with experts chosen by x."""

    attention: Part
    norm: Norm
    experts: Experts

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        y = self.attention(net, at, x)
        mixed = self.experts.mix(net, at, self.norm(net, at, y), x)
        return add(y, named_branch(net, at, self.experts, mixed))


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    has_windows = r.count("attention.sliding_window", 0, least=0) > 0
    windows = read_windows(r, b, PERIOD, window=0, dense_first=True)
    experts = read_experts(r, b, reglu, gating=read_gating(r))

    def block(i: int) -> Part:
        here = windows[i] | {"window": WINDOW} if windows[i] else {}
        here |= {"rope": None} if has_windows and i % PERIOD == 0 else {}
        attention = residual(b.norm("attn_norm"), b.attention(i, **here))
        return _Block(attention, b.norm("ffn_norm"), experts[i])

    return b.decoder(block)


SMALLTHINKER = Architecture(
    "smallthinker",
    _decoder,
    {"attention.sliding_window": 8, "expert_count": 4, "expert_used_count": 2}
    | {"expert_feed_forward_length": 256, "expert_gating_func": 2},
)
