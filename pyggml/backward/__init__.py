"""The graph of a loss → the graph of its gradients. Each op's formula stands with the op.

    training_graph   all of these, in their order
    build_backward   the chain rule
    round_attention  a pass: attention may round as its backward pass does
    round_large      a pass: backward nodes read rounded copies of large tensors
    round_gradients  a pass: gradients of matrices in BF16 are products of BF16
    rematerialise    a pass: some results are computed again instead of kept

`backward_steps` lists the rules as they are applied. `pyggml.look.check` compares gradients with
float64 slopes.
"""

from pyggml.backward.recompute import Keep, rematerialise
from pyggml.backward.rounding import round_attention, round_gradients, round_large
from pyggml.backward.training import training_graph
from pyggml.backward.walk import BackwardStep, backward_steps, build_backward

__all__ = [
    "BackwardStep", "Keep", "backward_steps", "build_backward", "rematerialise", "round_attention",
    "round_gradients", "round_large", "training_graph",
]  # fmt: skip
