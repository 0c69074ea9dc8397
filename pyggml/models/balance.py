"""How evenly the routers of a mixture load its experts, and the loss that makes them more even.

Switch Transformers (Fedus et al. 2021), equations 4 to 6, over all layers at once as transformers'
`load_balancing_loss_func` has it:

    f[e]    share of tokens that expert e computes, mean over layers; Σ f = n_used
    P[e]    its mean probability, softmax of the router's logits
    loss    n_expert · Σ_e f[e] · P[e], n_used where all are loaded alike

f is a count: gradients flow through P alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import add, concat, get_rows, mul, repeat_back, reshape, scale, soft_max, sum_rows


@dataclass(frozen=True, slots=True)
class Routing:
    """A layer's router: logits (T, n_expert), and the experts that it chose, (T, n_used) int32."""

    logits: Tensor
    chosen: Tensor


def expert_load(routings: Sequence[Routing], share: Tensor) -> Tensor:
    """(layers, n_expert): Σ_t share[t] · how often token t chose the expert; share (T,)."""
    n_expert = routings[0].logits.shape[1]
    one_hot = leaf(np.eye(n_expert, dtype=np.float32), "one expert")
    of_token = reshape(share, (*share.shape, 1, 1))
    loads = (
        repeat_back(mul(get_rows(one_hot, r.chosen), of_token), (1, 1, n_expert)) for r in routings
    )
    return reduce(lambda a, b: concat(a, b, 0), (reshape(x, (1, n_expert)) for x in loads))


def balance_loss(routings: Sequence[Routing], share: Tensor, load: Tensor) -> Tensor:
    """The loss (), see above. share (T,): each token's part of the whole; load: `expert_load`."""
    n_layers, n_expert = load.shape
    of_token = reshape(share, (*share.shape, 1))
    means = (repeat_back(mul(soft_max(r.logits), of_token), (1, n_expert)) for r in routings)
    f = repeat_back(load, (1, n_expert))
    loss = sum_rows(mul(reduce(add, means), f))
    return reshape(scale(loss, n_expert / n_layers**2), ())
