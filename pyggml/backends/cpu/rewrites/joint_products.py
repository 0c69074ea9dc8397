"""Products with a weight that take along what LoRA adds to their results, on the CPU.

    y = mul_mat_add(mul_mat(w, x), b, t); cpy(y, BF16)    mul_mat_low_rank(b, t, w, x), its saved
    out_prod_add(out_prod(a, sᵀ), w, dyᵀ)                 out_prod_low_rank(a, s, w, dy)
    out_prod_add(out_prod_add(c, a, sᵀ), w, dyᵀ)          out_prod_low_rank_add(c, a, s, w, dy)

Apart, the nodes write and read the whole result up to three times, and caches are too small for it.
A joint node writes it once. The bits are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import SAVED, changed_by
from pyggml.graph.tensor import Tensor
from pyggml.kernels.gemm.beside import MOST
from pyggml.kernels.gemm.thin import WIDEST
from pyggml.ops.layout.layout import CPY, TRANSPOSE
from pyggml.ops.product.low_rank import MUL_MAT_LOW_RANK, OUT_PROD_LOW_RANK, OUT_PROD_LOW_RANK_ADD
from pyggml.ops.product.matmul import MUL_MAT, MUL_MAT_ADD, OUT_PROD, OUT_PROD_ADD


class _Apart(NamedTuple):
    """Two products, of which the second adds to the first; perhaps a rounded copy of the sum."""

    first: Tensor
    second: Tensor
    src: tuple[Tensor, ...]  # of the joint node
    copy: Tensor | None = None


def with_joint_products(graph: Graph) -> Graph:
    """The graph with joint products wherever the second alone reads the first, and nothing that the
    first reads is written over before; a graph with nothing to join is returned itself."""
    readers = defaultdict[Tensor, list[Tensor]](list)
    for t in graph.nodes:
        for s in t.src:
            readers[s].append(t)
    found = dict[Tensor, _Apart]()
    changed = set[Tensor]()  # so far: the first would read it too late
    for t in graph.nodes:
        changed.update(changed_by(t))
        apart = _forward(t, readers[t]) or _backward(t)
        if apart is None or changed.intersection(s.root for s in apart.first.src):
            continue
        if readers[apart.first] == [t] and apart.first not in graph.outputs:
            found[t] = apart
    return _joined(graph, found) if found else graph


def _forward(t: Tensor, readers: Collection[Tensor]) -> _Apart | None:
    if t.op is not MUL_MAT_ADD or t.src[0].op is not MUL_MAT:
        return None
    first, b, d = t.src
    w, x = first.src
    copies = [r for r in readers if r.op is CPY and r.dtype is BF16]
    fit = _are_low_rank(b, d, b.shape[-1]) and _are_packed(w, x) and t.shape[-1] > WIDEST
    return _Apart(first, t, (b, d, w, x), copies[0] if copies else None) if fit else None


def _backward(t: Tensor) -> _Apart | None:
    if t.op is not OUT_PROD_ADD or t.src[0].op not in (OUT_PROD, OUT_PROD_ADD):
        return None
    first, w, turned = t.src
    *c, a, d_turned = first.src
    if turned.op is not TRANSPOSE or d_turned.op is not TRANSPOSE:
        return None
    d, dy = d_turned.src[0], turned.src[0]
    fit = _are_low_rank(a, d, a.shape[0]) and _are_packed(w, dy) and t.shape[-1] > WIDEST
    return _Apart(first, t, (*c, a, d, w, dy)) if fit else None


def _are_low_rank(leaf: Tensor, rows: Tensor, rank: int) -> bool:
    """Whether these are a float32 leaf and rows of so many numbers, few enough."""
    return leaf.root.op is None and leaf.dtype is F32 and _are_whole(leaf, rows) and rank <= MOST


def _are_packed(w: Tensor, rows: Tensor) -> bool:
    """Whether these are a leaf that a product unpacks, and rows."""
    return w.root.op is None and w.dtype is not F32 and _are_whole(w, rows)


def _are_whole(*matrices: Tensor) -> bool:
    return all(len(t.shape) == 2 and t.is_contiguous for t in matrices)


def _joined(graph: Graph, found: dict[Tensor, _Apart]) -> Graph:
    """The graph with these joined."""
    gone = {t for apart in found.values() for t in (apart.first, apart.copy)}
    new: dict[Tensor, Tensor] = {}
    steps = []
    for t in graph.nodes:
        if t in gone or t.op is SAVED:
            continue
        apart = found.get(t)
        if apart is None:
            src = tuple(new.get(s, s) for s in t.src)
            made = t if src == t.src else t.reading(src)
            new.update(zip(t.saved, made.saved, strict=True))
        else:
            made = _joint(apart, tuple(new.get(s, s) for s in apart.src)).named(t.name)
            if apart.copy is not None:
                new[apart.copy] = made.saved[0]
        new[t] = made
        steps.append(made)
    outputs = (new.get(t, t) for t in graph.outputs)
    return Graph.of(*outputs, steps=steps).noted(graph.notes)


def _joint(apart: _Apart, src: tuple[Tensor, ...]) -> Tensor:
    if apart.second.op is MUL_MAT_ADD:
        return MUL_MAT_LOW_RANK(*src, rounds=apart.copy is not None)
    return (OUT_PROD_LOW_RANK if len(src) == 4 else OUT_PROD_LOW_RANK_ADD)(*src)
