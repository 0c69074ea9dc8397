"""Which nodes can share what their kernels make of one source: packed activations, above all.

The products of q, k and v read the same x, those of gate and up another one. Each packs it for the
microkernel; in a plan the first does it for all. The numbers are the same as without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pyggml.backends import Backend
from pyggml.dtypes import I8
from pyggml.graph import Graph
from pyggml.op import SHARED, has_kernel
from pyggml.tensor import Tensor


def sharing(graph: Graph, backend: Backend) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The scratch, and the two or more nodes that share it, in the order in which they run."""
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
