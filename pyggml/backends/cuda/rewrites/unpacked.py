"""Where a card has room, the weights of a training step's wide products and of its loss stay
unpacked, in bfloat16; and matrices that are trained are rounded once for both passes.

To unpack them takes three tenths of a short step, and so little of a long one that no weight stays.
Half of the memory that is free beside the graph and its leaves is used, so that other graphs and
programs have room too; these may read what stays. Results are the same bits where cuBLAS gets the
same numbers at the same distances; not of an output matrix of more than 1 GiB, which is sliced
unless it stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pyggml.alloc import plan
from pyggml.backends.cuda.ops.lora.products import lasting_bytes
from pyggml.backends.cuda.ops.loss.head import LOSSES, unpacked_bytes, with_lasting_matrix
from pyggml.backends.cuda.runtime.kernel import again, is_of
from pyggml.graph import Graph
from pyggml.graph.arrays import is_constant
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import changed_by, has_kernel
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend

_SHARE = 2  # one part in so many of what is free
# A step unpacks a weight in the time in which it multiplies it with so many rows: on an H100, steps
# of 512 tokens took 27 % less at 8B, and 15 % at 1.7B, where branches ran beside.
_ROWS = 185


class _Candidate(NamedTuple):
    """A weight that a node unpacks, the bytes that it takes, and the node for which it lasts."""

    w: Tensor
    n_bytes: int
    successor: Tensor


@graph_pass
def with_unpacked_weights(graph: Graph, card: CudaBackend) -> Graph:
    """The graph whose wide products and loss read weights that stay unpacked: in training as many
    as have room, and those of earlier graphs."""
    candidates = {t: c for t in graph.nodes if (c := _candidate(t, card)) is not None}
    trains = any(is_of(t, "wide_back", "wide_back_add") for t in candidates)
    new = [c for c in candidates.values() if c.w not in card.unpacked]
    worth = trains and bool(new) and _gain(candidates) >= card.copies_from
    if worth and (left := room(graph, card)) is not None:
        for w, n_bytes, _ in new:
            if w not in card.unpacked and n_bytes <= left:
                card.unpacked[w] = n_bytes
                left -= n_bytes
    lasting = (
        (t, c.successor) for t, c in candidates.items() if card.unpacked.get(c.w) == c.n_bytes
    )
    return rewrite(graph, dict(lasting))


def _candidate(t: Tensor, card: CudaBackend) -> _Candidate | None:
    """Of a node with a packed weight that never changes."""
    if is_of(t, "wide_product", "wide_back", "wide_back_add"):
        w, n_bytes = t.src[-3], lasting_bytes(t)
        successor = again(t, *t.src, unpacked=True)
    elif is_of(t, *LOSSES) and (n_bytes := unpacked_bytes(t, card.compute)):
        w, successor = t.src[1], with_lasting_matrix(t)
    else:
        return None
    may_last = w.op is None and w.base is None and is_constant(w) and w not in card.streamed
    return _Candidate(w, n_bytes, successor) if may_last else None


def _gain(nodes: Iterable[Tensor]) -> float:
    """The share of a step's time that unpacking takes, with so many rows as these nodes have."""
    n_rows = max(t.src[-2].shape[0] for t in nodes if is_of(t, "wide_back", "wide_back_add"))
    return _ROWS / (_ROWS + n_rows)


@graph_pass
def with_shared_copies(graph: Graph, card: CudaBackend) -> Graph:
    """The graph whose backward pass reads the forward pass's copies in BF16 of leaves, where all
    of them have room; memory is kept for them in between."""
    changed = {root for t in graph.nodes for root in changed_by(t)}
    first: dict[Tensor, Tensor] = {}
    same: dict[Tensor, Tensor] = {}
    for t in graph.nodes:
        is_copy = is_of(t, "cpy") and t.dtype is BF16 and t.base is None
        if is_copy and t.src[0].op is None and t.src[0].root not in changed:
            one = first.setdefault(t.src[0], t)
            if one is not t:
                same[t] = one
    left = room(graph, card) if same else None
    n_bytes = sum(t.n_bytes for t in {*same.values()})
    return rewrite(graph, same) if left is not None and n_bytes <= left else graph


def room(graph: Graph, card: CudaBackend) -> int | None:
    """Bytes for what makes a graph faster; None if other devices compute a part of it, or weights
    are streamed for want of memory."""
    memory = card.memory()
    if (
        memory is None
        or card.streamed
        or any(card.refusal(t) for t in graph.nodes if has_kernel(t))
    ):
        return None
    leaves = sum(card.allocation(t.n_bytes) for t in {t.root: None for t in graph.leaves})
    return (memory[0] - plan(graph, card).n_bytes - leaves - card.own(len(graph.nodes))) // _SHARE
