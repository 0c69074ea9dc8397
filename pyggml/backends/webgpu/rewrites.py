"""What this device changes in a graph: fewer nodes, each of which costs the host and the device
microseconds, and fewer passes over memory.

The passes of the CPU serve here too: gradients that are added to their sum as they are made,
products that take along what LoRA adds, and swiglu's gradients in one.
"""

from pyggml.backends.cpu.rewrites.joint_backs import JOINT_BACK
from pyggml.backends.cpu.rewrites.joint_products import JOINT_PRODUCTS
from pyggml.backends.cpu.rewrites.onto_sums import PRODUCT_ONTO_SUM
from pyggml.graph import Graph
from pyggml.graph.table import by_table

# Without the products that round as well.
TABLE = (PRODUCT_ONTO_SUM, JOINT_BACK, *JOINT_PRODUCTS[1:])


def rewritten(graph: Graph) -> Graph:
    """The graph as this device computes it."""
    return by_table(graph, TABLE)
