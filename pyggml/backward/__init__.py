"""The graph of a loss in, that of its gradients out; then passes from graph to graph. No op's
formula is here.

    build_backward   the chain rule
    round_large      what is read as a rounded copy
    rematerialise    what is computed again

`check_gradient` holds gradients against float64 slopes; `evaluate` computes a graph in float64.
"""

from pyggml.backward.check import Slope, check_gradient, evaluate
from pyggml.backward.rematerialise import Keep, rematerialise
from pyggml.backward.round_large import round_large
from pyggml.backward.walk import build_backward

__all__ = [
    "Keep",
    "Slope",
    "build_backward",
    "check_gradient",
    "evaluate",
    "rematerialise",
    "round_large",
]
