"""Rows that alone are read of a result are computed alone, on the CPU.

A prompt's logits are read of its last token. What follows the last attention computes each row of
its result from the same row of its sources: so those rows are taken before it.

    x, o (512, n)  ->  norm(x + o·Wᵀ)  ->  get_rows      512 rows are multiplied
    x, o (512, n)  ->  get_rows of both  ->  norm(x + o·Wᵀ)    as many as are read

A product of fewer rows may take another path, whose bits differ; then it stays as it is.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute
from pyggml.ops.layout.rows import GET_ROWS
from pyggml.ops.product.matmul import MUL_MAT
from pyggml.ops.product.problem import problem_of


@graph_pass
def early_rows(graph: Graph, compute: Compute) -> Graph:
    """The graph with get_rows, of fewer rows than there are, before what makes these; the same
    graph if nothing can be left out."""
    new = dict[Tensor, Tensor]()
    for t in graph.by_op.get(GET_ROWS.name, ()):
        table, ids = t.src
        if len(ids.shape) == 1 and len(table.shape) == 2 and ids.shape[0] < table.shape[0]:
            own = _by_rows(graph, t, compute)
            new |= {t: _rows(table, ids, own, {})} if own else {}
    return rewrite(graph, new)


def _by_rows(graph: Graph, t: Tensor, compute: Compute) -> Mapping[Tensor, Collection[int]]:
    """The nodes that t = get_rows alone reads, by way of others of these, and of each its sources
    in rows."""
    own: dict[Tensor, Collection[int]] = {}
    for node in reversed(graph.nodes[: graph.places[t]]):
        readers = graph.readers[node]
        if readers and {t, *own}.issuperset(readers) and node not in graph.outputs:
            sources = _sources_in_rows(node, t.src[1], compute)
            own |= {node: sources} if sources else {}
    return own


def _sources_in_rows(node: Tensor, ids: Tensor, compute: Compute) -> Collection[int]:
    """The positions of the sources of whose rows each row of a result is computed, and it has the
    same bits beside fewer others; () if there is no such rule."""
    if len(node.shape) != 2 or node.dtype is not F32 or node.base is not None or node.saved:
        return ()
    if node.op is MUL_MAT:
        w, x = node.src
        p = problem_of("mul_mat", node, x, compute)
        fewer = replace(p, m=ids.shape[0])
        is_alike = len(w.shape) == 2 and gemm.path_of(p) is gemm.path_of(fewer)
        return (1,) if is_alike and w.root.op is None else ()
    if node.op is None or node.op.formula is None:
        return ()
    shapes = [s.shape for s in node.src]
    in_rows = [i for i, shape in enumerate(shapes) if shape == node.shape]
    return in_rows if all(s in (node.shape, node.shape[1:]) for s in shapes) else ()


def _rows(
    t: Tensor, ids: Tensor, own: Mapping[Tensor, Collection[int]], images: dict[Tensor, Tensor]
) -> Tensor:
    """Those rows of t, of which the nodes `own` are computed anew; images: what is made already."""
    if t not in images:
        images[t] = GET_ROWS(t, ids)
        if t in own:
            assert t.op is not None
            src = [_rows(s, ids, own, images) if i in own[t] else s for i, s in enumerate(t.src)]
            images[t] = t.op(*src, **t.params)
    return images[t]
