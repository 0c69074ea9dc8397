"""Gradients of a loss that is at hand as a tensor, and leaves to build one of."""

import numpy as np

from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf


def filled(shape, seed=0, name=""):
    """A leaf of float32 numbers that a seed draws."""
    return leaf(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), name)


def gradients_of(loss, parameters, seed=None, accumulators=None):
    """One tensor for each parameter, as the outputs of build_backward's graph have them."""
    return list(build_backward(Graph.of(loss), parameters, seed, accumulators).outputs[1:])
