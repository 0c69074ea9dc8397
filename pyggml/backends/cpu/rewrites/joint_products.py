"""Products with a weight that take along what LoRA adds to their results, on the CPU.

    y = mul_mat_add(mul_mat(w, x), b, t); cpy(y, BF16)    mul_mat_low_rank(b, t, w, x), its saved
    out_prod_add(out_prod(a, sᵀ), w, dyᵀ)                 out_prod_low_rank(a, s, w, dy)
    out_prod_add(out_prod_add(c, a, sᵀ), w, dyᵀ)          out_prod_low_rank_add(c, a, s, w, dy)

Apart, the nodes write and read the whole result up to three times, and caches are too small for it.
A joint node writes it once. The bits are the same.
"""

from collections.abc import Iterator, Sequence

from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import changed_by
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.kernels.gemm.beside import MOST
from pyggml.kernels.gemm.thin import WIDEST
from pyggml.ops.layout.cpy import CPY
from pyggml.ops.layout.layout import TRANSPOSE
from pyggml.ops.product.low_rank import MUL_MAT_LOW_RANK, OUT_PROD_LOW_RANK, OUT_PROD_LOW_RANK_ADD
from pyggml.ops.product.matmul import MUL_MAT, MUL_MAT_ADD, OUT_PROD, OUT_PROD_ADD


@graph_pass
def with_joint_products(graph: Graph) -> Graph:
    """The graph with joint products wherever the second alone reads the first, and nothing that the
    first reads is written over before; a graph with nothing to join is returned itself."""
    return rewrite(graph, dict(_matches(graph)))


def _matches(graph: Graph) -> Iterator[tuple[Tensor, Tensor]]:
    changed = set[Tensor]()  # so far: the first would read it too late
    for t in graph.nodes:
        changed.update(changed_by(t))
        joint = _forward(t, graph.readers[t]) or _backward(t)
        if joint is None or changed.intersection(s.root for s in t.src[0].src):
            continue
        if graph.is_only_for(t.src[0], t):
            yield from joint


Joint = Sequence[tuple[Tensor, Tensor]]  # results of nodes, and those of the joint one


def _forward(y: Tensor, readers: Sequence[Tensor]) -> Joint | None:
    """If y adds LoRA's part to a product: y and a rounded copy, from one node."""
    if y.op is not MUL_MAT_ADD or y.src[0].op is not MUL_MAT:
        return None
    plain, b, d = y.src
    w, x = plain.src
    if not _are_low_rank(b, d, b.shape[-1]) or not _are_packed(w, x) or y.shape[-1] <= WIDEST:
        return None
    copies = [r for r in readers if r.op is CPY and r.dtype is BF16][:1]
    joint = MUL_MAT_LOW_RANK(b, d, w, x, rounds=bool(copies))
    return [(y, joint), *zip(copies, joint.saved, strict=True)]


def _backward(dx: Tensor) -> Joint | None:
    """If dx adds the product with W to that with A: dx from one node."""
    if dx.op is not OUT_PROD_ADD or dx.src[0].op not in (OUT_PROD, OUT_PROD_ADD):
        return None
    thin, w, dy_turned = dx.src
    *c, a, d_turned = thin.src
    if dy_turned.op is not TRANSPOSE or d_turned.op is not TRANSPOSE:
        return None
    d, dy = d_turned.src[0], dy_turned.src[0]
    if not _are_low_rank(a, d, a.shape[0]) or not _are_packed(w, dy) or dx.shape[-1] <= WIDEST:
        return None
    return [(dx, (OUT_PROD_LOW_RANK_ADD if c else OUT_PROD_LOW_RANK)(*c, a, d, w, dy))]


def _are_low_rank(leaf: Tensor, rows: Tensor, rank: int) -> bool:
    """Whether these are a float32 leaf and rows of so many numbers, few enough."""
    return leaf.root.op is None and leaf.dtype is F32 and _are_whole(leaf, rows) and rank <= MOST


def _are_packed(w: Tensor, rows: Tensor) -> bool:
    """Whether these are a leaf that a product unpacks, and rows."""
    return w.root.op is None and w.dtype is not F32 and _are_whole(w, rows)


def _are_whole(*matrices: Tensor) -> bool:
    return all(len(t.shape) == 2 and t.is_contiguous for t in matrices)
