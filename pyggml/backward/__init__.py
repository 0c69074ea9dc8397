"""Loss and parameters in, gradient tensors out, in the same graph. No op's formula is here.

`check_gradient` holds gradients against float64 slopes; `evaluate` computes a graph in float64.
"""

from pyggml.backward.check import Slope, check_gradient, evaluate
from pyggml.backward.recompute import Keep
from pyggml.backward.walk import build_backward

__all__ = ["Keep", "Slope", "build_backward", "check_gradient", "evaluate"]
