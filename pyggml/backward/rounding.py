"""What a training pass rounds, beside what products do.

Its attention may round as its backward pass does, which needs the probabilities of the same scores.

Large tensors inside a layer are kept for the backward pass as rounded copies.

Each copy is made right after its tensor, whose memory is then free after its last use in the
forward pass. The backward pass widens the copy to float32 and reads that. Results of cheap ops on
large tensors are not kept: they are computed again, from the widened copies.

A matrix that is trained in float32 and multiplied in bfloat16 has its gradient by such a product.
"""

from pyggml.backward.substitute import (
    forward_and_backward,
    irreplaceable,
    recomputable,
    with_substitutes,
)
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F32, DType
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops import cpy
from pyggml.ops.attention.attention import FLASH_ATTN_EXT, may_round
from pyggml.ops.layout.cpy import CPY
from pyggml.ops.layout.layout import RESHAPE, reshape
from pyggml.ops.product.matmul import MUL_MAT, OUT_PROD


@graph_pass
def round_attention(graph: Graph) -> Graph:
    """The graph, all of whose attention may round. `graph` comes from build_backward."""
    forward, _ = forward_and_backward(graph)
    return rewrite(graph, {t: may_round(t) for t in forward if t.op is FLASH_ATTN_EXT})


@graph_pass
def round_large(graph: Graph, kept_as: DType) -> Graph:
    """The graph, with its large tensors (graph.notes) kept as `kept_as`: F32 or BF16.

    `graph` comes from build_backward. The loss is unchanged; the gradients include the rounding.
    """
    if kept_as is F32:
        return graph
    forward, _ = forward_and_backward(graph)
    large = graph.notes.large - irreplaceable(graph)
    copies = {t: cpy(t, kept_as) for t in forward if t in large}
    wide = {t: cpy(copy, F32).named(t.name) for t, copy in copies.items()}
    with_copies = [x for t in forward for x in (t, copies.get(t)) if x is not None]
    return with_substitutes(graph, _large_and_made_of(large, graph), with_copies, wide)


def _large_and_made_of(large: frozenset[Tensor], graph: Graph) -> set[Tensor]:
    """Large owners, and the results of cheap ops on them."""
    forward, _ = forward_and_backward(graph)
    again = recomputable(graph) - irreplaceable(graph)
    owners: set[Tensor] = set()
    for t in forward:
        if t in large or (t in again and any(s.root in owners for s in t.src)):
            owners.add(t)
    return owners


@graph_pass
def round_gradients(graph: Graph, kept_as: DType) -> Graph:
    """The graph, whose gradients of matrices in BF16, dW = dyᵀ·x, read x in BF16, unless large
    tensors are kept as F32.

    `graph` comes from build_backward, and `round_large` has passed over it.
    """
    if kept_as is F32:
        return graph
    narrow = dict[Tensor, Tensor]()
    changed = {t: _of_narrow(t, narrow) for t in graph.nodes if _is_gradient(t, graph)}
    return rewrite(graph, changed)


def _is_gradient(t: Tensor, graph: Graph) -> bool:
    """Whether t is the gradient of a matrix in BF16, of float32 rows without gaps."""
    product = graph.notes.backward.get(t) if t.op is OUT_PROD else None
    if product is None or product.op is not MUL_MAT:
        return False
    (w, _), (x, dy) = product.src, t.src
    is_of_matrix = w.dtype is BF16 and t.shape == w.shape and x.dtype is F32
    return is_of_matrix and len(x.shape) == 2 and x.is_contiguous and dy.is_contiguous


def _of_narrow(t: Tensor, narrow: dict[Tensor, Tensor]) -> Tensor:
    """The product with x in BF16; x's copies are in `narrow`."""
    x = t.src[0]
    if x not in narrow:
        narrow[x] = _in_bf16(x)
    return OUT_PROD(narrow[x], t.src[1])


def _in_bf16(x: Tensor) -> Tensor:
    """x in BF16: what it was widened from, if it was."""
    if x.op is CPY and x.src[0].dtype is BF16:
        return x.src[0]
    return reshape(_in_bf16(x.src[0]), x.shape) if x.op is RESHAPE else cpy(x, BF16)
