"""What this device changes in a graph: fewer nodes, each of which costs the host and the device
microseconds, and fewer passes over memory.

The passes of the CPU serve here too: products that take along what LoRA adds, and swiglu's
gradients in one.
"""

from pyggml.backends.cpu.rewrites.joint_backs import JOINT_BACK
from pyggml.backends.cpu.rewrites.joint_products import JOINT_PRODUCTS
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.op import over_first
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite, by_table
from pyggml.ops.product.matmul import OUT_PROD_ADD


def _lies_in_leaf(m: Match) -> bool:
    return m.total.is_write and m.so_far.shape == m.product.shape and m.product.dtype is F32


def _at_once(m: Match) -> Replacements:
    return {m.total: over_first(OUT_PROD_ADD(m.so_far, *m.product.src))}


# A gradient is added to its accumulator as it is made.
SUM = Rewrite(
    Pattern("product = out_prod(a, b); total = add(so_far, product)"), _lies_in_leaf, _at_once
)
TABLE = (SUM, JOINT_BACK, *JOINT_PRODUCTS[1:])  # without those that round as well


def rewritten(graph: Graph) -> Graph:
    """The graph as this device computes it."""
    return by_table(graph, TABLE)
