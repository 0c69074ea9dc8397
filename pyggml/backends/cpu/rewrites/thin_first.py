"""The order of products of one source: thin ones first, then all others.

Where LoRA adapts W, both x·Wᵀ and x·Aᵀ read x. The first takes milliseconds and fills the caches
with W; the second hardly does more than read x. So it stands before, where x has just been made.
Products with W follow one another, q, k and v, where threads are many: their tasks run side by
side, as nothing that reads one of them stands between. Two threads gain nothing by that, and lose
what the caches still have of a result.
"""

from collections import defaultdict

from pyggml import threads
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.kernels.gemm.thin import WIDEST
from pyggml.ops.product.low_rank import MUL_MAT_LOW_RANK
from pyggml.ops.product.matmul import MUL_MAT

_MANY = 3  # threads


@graph_pass
def thin_first(graph: Graph) -> Graph:
    """The graph with products with a thin float32 leaf before those with packed weights that read
    the same source, and these together. Numbers are the same; a graph whose order is this one is
    returned as it is."""
    packed: dict[Tensor, Tensor] = {}  # source -> its first product with a packed weight
    before, after = (defaultdict[Tensor, list[Tensor]](list) for _ in range(2))
    for t in graph.nodes:
        if t.op in (MUL_MAT, MUL_MAT_LOW_RANK):
            w, x = t.src[-2:]
            if w.dtype is not F32:
                first = packed.setdefault(x, t)
                after[first if threads.most() >= _MANY else t].append(t)
            elif x in packed and w.root.op is None and w.shape[-2] <= WIDEST:
                before[packed[x]].append(t)
    steps = dict.fromkeys(
        t for node in graph.nodes for t in (*before.get(node, ()), node, *after.get(node, ()))
    )
    return graph if [*steps] == [*graph.nodes] else rewrite(graph, {}, steps)
