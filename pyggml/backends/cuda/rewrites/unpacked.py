"""Where a card has room, the weights of a training step's wide products stay unpacked, in bfloat16.

To unpack them takes three tenths of a short step. Half of the memory that is free beside the graph
and its leaves is used, so that other graphs and programs have room too; these may read what stays.
Results are the same bits: cuBLAS gets the same numbers at the same distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pyggml.alloc import plan
from pyggml.backends.cpu import is_constant
from pyggml.backends.cuda.ops.lora.products import lasting_bytes
from pyggml.backends.cuda.runtime.kernel import is_of
from pyggml.graph import Graph
from pyggml.graph.op import has_kernel
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend

_SHARE = 2  # one part in so many of what is free


def with_unpacked_weights(graph: Graph, card: CudaBackend) -> Graph:
    """The graph whose wide products read weights that stay unpacked: in training as many as have
    room, and those of earlier graphs."""
    products = {t: lasting_bytes(t) for t in graph.nodes if _may_last(t)}
    trains = any(is_of(t, "wide_back", "wide_back_add") for t in products)
    new = {t: n for t, n in products.items() if t.src[-3] not in card.unpacked}
    if trains and new and (left := _room(graph, card)) is not None:
        for t, n_bytes in new.items():
            w = t.src[-3]
            if w not in card.unpacked and n_bytes <= left:
                card.unpacked[w] = n_bytes
                left -= n_bytes
    return rewrite(graph, dict(_lasting(products, card)))


def _may_last(t: Tensor) -> bool:
    """Whether it is a wide product with a packed weight that never changes."""
    if not is_of(t, "wide_product", "wide_back", "wide_back_add"):
        return False
    w = t.src[-3]
    return w.op is None and w.base is None and is_constant(w)


def _lasting(products: dict[Tensor, int], card: CudaBackend) -> Iterator[tuple[Tensor, Tensor]]:
    """Each product of a weight that lasts in as many bytes as it asks for, and its successor."""
    for t, n_bytes in products.items():
        if card.unpacked.get(t.src[-3]) == n_bytes:
            yield t, replace(t, params={**t.params, "unpacked": True}, saved=(), data=None)


def _room(graph: Graph, card: CudaBackend) -> int | None:
    """Bytes for unpacked weights; None if other devices compute a part of the graph."""
    memory = card.memory()
    if memory is None or any(card.refusal(t) for t in graph.nodes if has_kernel(t)):
        return None
    leaves = sum(card.allocation(t.n_bytes) for t in {t.root: None for t in graph.leaves})
    return (memory[0] - plan(graph, card).n_bytes - leaves - card.own) // _SHARE
