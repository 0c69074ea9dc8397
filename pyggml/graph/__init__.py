"""The nouns of the engine: tensors, ops, and graphs of them; nothing is computed here."""

from pyggml.graph.graph import Graph, Notes, reachable, topological
from pyggml.graph.overwriting import last_write
from pyggml.graph.tensor import Tensor, leaf, zeros

__all__ = ["Graph", "Notes", "Tensor", "last_write", "leaf", "reachable", "topological", "zeros"]
