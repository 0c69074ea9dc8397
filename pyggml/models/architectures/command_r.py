"""command-r, cohere2 and cohere2moe: Command R, R+, R7B, A and Aya.

Attention and feed-forward are parallel, with one norm. Norms are layer norms without biases; R+ has
them on q and k too, with a weight for each head. In cohere2, a layer has either a sliding window
and rotary positions, or neither. cohere2moe has experts in all layers but the first few, whose
output and that of the shared expert are halved; the first layers always rotate.
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.block import Scaled, Sum
from pyggml.models.experts import MIXTURE, SIGMOID, read_feed_forward, read_router
from pyggml.ops import swiglu


def _command_r(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", layer_norm=("weight",))

    def block(i: int) -> Part:
        attention = b.attention(i, **b.norms_of_each_head(r, i))
        return b.parallel(attention, b.gated_mlp(i, swiglu))

    return b.decoder(block, logit_scale=_logit_scale(r))


def _cohere2(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal", layer_norm=("weight",))
    windows = read_windows(r, b, 4, rope=b.rope)

    def block(i: int) -> Part:
        return b.parallel(b.attention(i, **(windows[i] or {"rope": None})), b.gated_mlp(i, swiglu))

    return b.decoder(block, logit_scale=_logit_scale(r))


def _cohere2moe(r: Reader) -> Decoder:
    """Norms are RMS norms if the file has their epsilon."""
    is_rms = r.number("attention.layer_norm_rms_epsilon", 0.0, 0.0, 1.0) > 0
    b = read_basics(r, rope="normal", layer_norm=None if is_rms else ("weight",))
    n_dense = r.count("leading_dense_block_count", least=0, most=1024)
    windows = read_windows(r, b, 4, dense_first=True)
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    n_shared = r.count("expert_shared_count", 0, least=0, most=64)
    length = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    shared = (length or n_shared * n_ff) if n_shared else 0
    router = read_router(r, SIGMOID) | {"biased": False}
    feed_forward = read_feed_forward(r, b, swiglu, shared, **router)

    def block(i: int) -> Part:
        here = windows[i] or ({} if i < n_dense else {"rope": None})
        mixture = feed_forward[i]
        halved = Scaled(mixture, 0.5) if isinstance(mixture, Sum) else mixture
        return b.parallel(b.attention(i, **here), halved)

    return b.decoder(block, logit_scale=_logit_scale(r))


def _logit_scale(r: Reader) -> float:
    """A scale of 0 means none."""
    return r.number("logit_scale", 0.0, -1e6, 1e6) or 1.0


COMMAND_R = Architecture("command-r", _command_r, {"logit_scale": 0.25})
COHERE2 = Architecture("cohere2", _cohere2, WINDOWS | {"logit_scale": 0.25})
COHERE2MOE = Architecture(
    "cohere2moe",
    _cohere2moe,
    dict(COHERE2.example)
    | MIXTURE
    | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True},
)
