"""The order of products of one source: thin ones first.

Where LoRA adapts W, both x·Wᵀ and x·Aᵀ read x. The first takes milliseconds and fills the caches
with W; the second hardly does more than read x. So it stands before, where x has just been made.
"""

from collections import defaultdict

from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.kernels.gemm.thin import WIDEST
from pyggml.ops.product.low_rank import MUL_MAT_LOW_RANK
from pyggml.ops.product.matmul import MUL_MAT


@graph_pass
def thin_first(graph: Graph) -> Graph:
    """The graph with products with a thin float32 leaf before those with packed weights that read
    the same source. Numbers are the same; a graph with no such pair is returned as it is."""
    packed: dict[Tensor, Tensor] = {}  # source -> its first product with a packed weight
    before = defaultdict[Tensor, list[Tensor]](list)
    for t in graph.nodes:
        if t.op in (MUL_MAT, MUL_MAT_LOW_RANK):
            w, x = t.src[-2:]
            if w.dtype is not F32:
                packed.setdefault(x, t)
            elif x in packed and w.root.op is None and w.shape[-2] <= WIDEST:
                before[packed[x]].append(t)
    if not before:
        return graph
    steps = [t for node in graph.nodes for t in (*before.get(node, ()), node)]
    return rewrite(graph, {}, steps)
