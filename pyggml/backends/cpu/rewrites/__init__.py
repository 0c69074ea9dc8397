"""What the CPU changes in a graph that it runs alone. It keeps every bit of a result."""

from pyggml.backends.cpu.rewrites.early_rows import early_rows
from pyggml.backends.cpu.rewrites.gated_products import gated_products
from pyggml.backends.cpu.rewrites.joint_backs import JOINT_BACK
from pyggml.backends.cpu.rewrites.joint_products import JOINT_PRODUCTS
from pyggml.backends.cpu.rewrites.narrow import narrow_rows, round_in_products
from pyggml.backends.cpu.rewrites.onto_sums import ONTO_SUMS
from pyggml.backends.cpu.rewrites.thin_first import thin_first
from pyggml.graph import Graph
from pyggml.graph.table import by_table
from pyggml.jit import JIT
from pyggml.kernels.kernel import Compute

# Without JIT NumPy rounds the exponentials of swiglu otherwise.
TABLE = ((JOINT_BACK,) if JIT else ()) + JOINT_PRODUCTS + ONTO_SUMS


def rewritten(graph: Graph, compute: Compute) -> Graph:
    """The graph as the CPU computes it."""
    graph = by_table(early_rows(graph, compute), (*gated_products(compute), *TABLE))
    graph = narrow_rows(thin_first(graph), compute)
    return round_in_products(graph, compute)
