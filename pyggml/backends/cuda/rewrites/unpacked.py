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
from pyggml.backends.cuda.ops.lora.products import lasting_bytes, split_sources
from pyggml.backends.cuda.ops.loss.head import LOSSES, unpacked_bytes, with_lasting_matrix
from pyggml.backends.cuda.runtime.kernel import again, is_of
from pyggml.backends.cuda.runtime.slabs import MemoryPlace, is_whole, places
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
_OPTIMISER = 3  # a gradient with both moments of AdamW takes so many times its bytes
# A step unpacks a weight in the time in which it multiplies it with so many rows: on an H100, steps
# of 512 tokens took 27 % less at 8B, and 15 % at 1.7B, where branches ran beside.
_ROWS = 185


class _Candidate(NamedTuple):
    """Weights that a node unpacks, the bytes of each, and those beside them all."""

    weights: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    beside: int
    reads_all: bool  # of the weights' piece


@graph_pass
def with_unpacked_weights(graph: Graph, card: CudaBackend) -> Graph:
    """The graph whose wide products and loss read weights that stay unpacked: in training as many
    as have room, and those of earlier graphs."""
    candidates = {t: c for t in graph.nodes if (c := _candidate(t, card)) is not None}
    trains = any(is_of(t, "wide_back", "wide_back_add") for t in candidates)
    new = any(w not in card.unpacked for c in candidates.values() for w in c.weights)
    if trains and new and _gain(candidates) >= card.copies_from:
        _unpack(candidates.values(), card, room(graph, card) or 0)
    lasting: dict[Tensor, Tensor] = {}
    for t, c in candidates.items():
        if (where := _places(c, card)) is not None:
            is_loss = is_of(t, *LOSSES)
            lasting[t] = with_lasting_matrix(t) if is_loss else again(t, *t.src, unpacked=where)
    return rewrite(graph, lasting)


def _unpack(candidates: Iterable[_Candidate], card: CudaBackend, left: int) -> None:
    """Give weights a place as long as there are bytes left; those of one product lie together."""
    of: dict[Tensor, _Candidate] = {}  # of each weight, the one with the most weights
    for c in sorted(candidates, key=lambda c: len(c.weights)):
        of |= dict.fromkeys(c.weights, c)
    for c in dict.fromkeys(of.values()):
        n_bytes = card.allocation(sum(c.sizes) + c.beside)
        if n_bytes <= left and not any(w in card.unpacked for w in c.weights):
            card.unpacked.update(zip(c.weights, places(c.sizes, c.beside), strict=True))
            left -= n_bytes


def _places(c: _Candidate, card: CudaBackend) -> tuple[MemoryPlace, ...] | None:
    """Where its weights stay unpacked, if they do so as it needs them."""
    where = tuple(card.unpacked[w] for w in c.weights if w in card.unpacked)
    if tuple(p.n_bytes for p in where) != c.sizes:
        return None
    return where if not c.reads_all or is_whole(where, c.beside) else None


def _candidate(t: Tensor, card: CudaBackend) -> _Candidate | None:
    """Of a node with packed weights that never change."""
    if is_of(t, "wide_product", "wide_back", "wide_back_add"):
        weights, (sizes, beside) = split_sources(t.src)[0], lasting_bytes(t)
    elif is_of(t, *LOSSES) and (n_bytes := unpacked_bytes(t, card.compute)):
        weights, sizes, beside = t.src[1:2], (n_bytes,), 0
    else:
        return None
    may_last = all(
        w.op is None and w.base is None and is_constant(w) and w not in card.streamed
        for w in weights
    )
    reads_all = is_of(t, "wide_back", "wide_back_add")
    return _Candidate(tuple(weights), sizes, beside, reads_all) if may_last else None


def _gain(nodes: Iterable[Tensor]) -> float:
    """The share of a step's time that unpacking takes, with so many rows as these nodes have."""
    backs = (t for t in nodes if is_of(t, "wide_back", "wide_back_add"))
    n_rows = max(split_sources(t.src)[1].shape[0] for t in backs)
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
    written = {root for t in graph.nodes for root in changed_by(t)}
    leaves = {t.root: _OPTIMISER if t.root in written else 1 for t in graph.leaves}
    n_bytes = plan(graph, card).n_bytes + card.own(2 * len(graph.nodes))  # with validation's
    n_bytes += sum(n * card.allocation(t.n_bytes) for t, n in leaves.items())
    return (memory[0] - n_bytes) // _SHARE
