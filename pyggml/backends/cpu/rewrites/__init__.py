"""Passes over a graph that the CPU runs alone, in their order. They keep every bit of a result."""

from collections.abc import Callable

from pyggml.backends.cpu.rewrites.joint_backs import with_joint_backs
from pyggml.backends.cpu.rewrites.joint_products import with_joint_products
from pyggml.backends.cpu.rewrites.thin_first import thin_first
from pyggml.graph import Graph
from pyggml.jit import JIT

REWRITES: tuple[Callable[[Graph], Graph], ...] = (
    # The backward pass of swiglu in one node. Without JIT NumPy rounds its exponentials otherwise.
    *([with_joint_backs] if JIT else []),
    # A product with a weight and what LoRA adds to it in one node.
    with_joint_products,
    # Of products of one source the thin ones first: the order of the nodes that are left.
    thin_first,
)
