"""Shared scratch: several nodes use one packed source.

The products of q, k and v read the same x; so do those of gate and up. A product packs x for the
microkernel. In a plan only the first product packs, and the others use its result. The numbers are
the same.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pyggml.backends.base import Backend
from pyggml.graph import Graph
from pyggml.graph.dtypes import I8
from pyggml.graph.op import SHARED, has_kernel
from pyggml.graph.tensor import Tensor


def sharing(graph: Graph, backend: Backend) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The shared pieces of scratch, each with its two or more nodes in the order of execution."""
    users: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    changed = {t.root for t in graph.nodes if t.is_write}
    for t in graph.nodes:
        if not has_kernel(t):
            continue
        n_bytes, what = backend.shared(t)
        if n_bytes and t.src[-1].root not in changed:
            x = t.src[-1]
            users[n_bytes, what, x.root, x.offset, x.shape, x.strides].append(t)
    for (n_bytes, *_), nodes in users.items():
        if len(nodes) > 1:
            yield Tensor((n_bytes,), I8, SHARED, (nodes[0],)), nodes
