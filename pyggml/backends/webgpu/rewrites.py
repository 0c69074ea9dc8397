"""What this device changes in a graph: fewer nodes, each of which costs the host and the device
microseconds, and fewer passes over memory.

The passes of the CPU serve here too: products that take along what LoRA adds, and swiglu's
gradients in one.
"""

from dataclasses import replace

from pyggml.backends.cpu.rewrites.joint_backs import JOINT_BACK
from pyggml.backends.cpu.rewrites.joint_products import JOINT_PRODUCTS, ONTO_SUM
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.table import by_table

# A gradient is added to its accumulator as it is made, and not of low rank alone, as on the CPU.
SUM = replace(
    ONTO_SUM,
    holds=lambda m: (
        m.total.is_write and m.so_far.shape == m.product.shape and m.product.dtype is F32
    ),
)
TABLE = (SUM, JOINT_BACK, *JOINT_PRODUCTS[1:])  # without those that round as well


def rewritten(graph: Graph) -> Graph:
    """The graph as this device computes it."""
    return by_table(graph, TABLE)
