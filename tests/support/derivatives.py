"""Gradients of a loss that is at hand as a tensor."""

from pyggml.backward import build_backward
from pyggml.graph import Graph


def gradients_of(loss, parameters, seed=None, accumulators=None):
    """One tensor for each parameter, as the outputs of build_backward's graph have them."""
    return list(build_backward(Graph.of(loss), parameters, seed, accumulators).outputs[1:])
