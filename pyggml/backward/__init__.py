"""The graph of a loss → the graph of its gradients. Each op's formula stands with the op.

    build_backward   the chain rule
    round_large      a pass: backward nodes read rounded copies of large tensors
    rematerialise    a pass: some results are computed again instead of kept

`backward_steps` lists the rules as they are applied; `check_gradient` compares gradients with
float64 slopes; `evaluate` computes a graph in float64.
"""

from pyggml.backward.check import Slope, check_gradient, evaluate
from pyggml.backward.rematerialise import Keep, rematerialise
from pyggml.backward.round_large import round_large
from pyggml.backward.walk import BackwardStep, backward_steps, build_backward

__all__ = [
    "BackwardStep",
    "Keep",
    "Slope",
    "backward_steps",
    "build_backward",
    "check_gradient",
    "evaluate",
    "rematerialise",
    "round_large",
]
