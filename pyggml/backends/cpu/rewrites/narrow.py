"""Rows that products alone read are written in bfloat16, and products round matrices, on the CPU.

A product with a matrix in BF16 rounds its rows as it packs them, and on tiles so does one with
packed weights. In F32 the rows are twice the bytes, which are written once and read by the product,
by the gradient of the matrix, and by a copy that is kept for it. A matrix that is trained in F32 is
rounded as its panels are packed: a copy in BF16 is written once and read once. The bits of the
products are the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import Op, Spec, changed_by
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.kernels import gemm
from pyggml.kernels.kernel import KERNELS, Compute
from pyggml.ops.activation.glu import SWIGLU, SWIGLU_BACK
from pyggml.ops.in_bf16 import NO_GRAD, bf16_op
from pyggml.ops.layout.cpy import CPY, cpy
from pyggml.ops.layout.layout import TRANSPOSE
from pyggml.ops.layout.rows import GET_ROWS
from pyggml.ops.norm.norm_mul import RMS_NORM_MUL
from pyggml.ops.product.gated import MUL_MAT_GATED
from pyggml.ops.product.matmul import MUL_MAT, OUT_PROD, OUT_PROD_ADD
from pyggml.ops.product.problem import problem_of, swap_axes
from pyggml.quants import dequantize, quantize

_WRITERS = (RMS_NORM_MUL, SWIGLU, SWIGLU_BACK, MUL_MAT_GATED)
_PRODUCTS = {op.name for op in (MUL_MAT, OUT_PROD, OUT_PROD_ADD)}  # those made of them, too


@graph_pass
def narrow_rows(graph: Graph, compute: Compute) -> Graph:
    """The graph with these rows in BF16; the same graph if it has none."""
    new = dict[Tensor, Tensor]()
    for t in graph.nodes:
        if t.op in _WRITERS and not t.is_write:
            results = [*enumerate((t, *t.saved))]
            rows = {i: r for i, r in results if _is_packed(graph, r, compute)}
            if rows:
                new[t] = _in_bf16(t, (), (*rows,))
            for each in rows.values():
                new |= _readers_of(graph, each)
    return rewrite(graph, new)


def _is_packed(graph: Graph, t: Tensor, compute: Compute) -> bool:
    """Whether all who read t round it: products, and copies."""
    readers = graph.readers.get(t)
    if len(t.shape) != 2 or not readers:
        return False
    return all(_rounds(graph, r, t, compute) for r in readers) and t not in graph.outputs


def _rounds(graph: Graph, reader: Tensor, t: Tensor, compute: Compute) -> bool:
    if reader.op is CPY:
        return reader.dtype is BF16
    if reader.op is TRANSPOSE:
        readers = graph.readers[reader] if reader not in graph.outputs else ()
        return bool(readers) and all(_packs(r, reader, compute) for r in readers)
    return _packs(reader, t, compute)


def _packs(product: Tensor, t: Tensor, compute: Compute) -> bool:
    """Whether a product rounds its rows t, and its path takes them in BF16."""
    assert product.op is not None
    if product.op.name not in _PRODUCTS or t in product.src[:-1] or product.src[-2].dtype is F32:
        return False
    return _is_taken(product, compute)


def _is_taken(product: Tensor, compute: Compute) -> bool:
    """Whether the path of a product takes rows in BF16, or rounds its matrix if that is asked."""
    assert product.op is not None
    rows = product.src[-1]
    if product.op.name == "mul_mat":
        return gemm.takes_narrow(problem_of("mul_mat", product, rows, compute))
    return gemm.takes_narrow(problem_of("out_prod", product, swap_axes(rows), compute))


def _readers_of(graph: Graph, t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Those who read t, and what stands for each once t is BF16."""
    for reader in graph.readers[t]:
        if reader.op is CPY:
            yield reader, t
        elif reader.op is TRANSPOSE:
            strides = tuple(s // 2 for s in reader.strides)
            yield reader, replace(reader, dtype=BF16, strides=strides, base=t.root, data=None)
            yield from ((r, _in_bf16(r, (len(r.src) - 1,))) for r in graph.readers[reader])
        else:
            yield reader, _in_bf16(reader, (len(reader.src) - 1,))


@graph_pass
def round_in_products(graph: Graph, compute: Compute) -> Graph:
    """The graph without copies in BF16 of matrices that products alone read, or that rows are read
    of; the same graph if it has none. Matrices that the graph changes stay."""
    changed = {root for t in graph.nodes for root in changed_by(t)}
    new = dict[Tensor, Tensor]()
    for t in graph.nodes:
        if t.op is CPY and t.dtype is BF16 and t not in graph.outputs:
            (w,) = t.src
            if w.dtype is F32 and w.root.op is None and w.root not in changed and w.is_contiguous:
                images = {r: _of_float32(r, t, w, compute) for r in graph.readers[t]}
                new |= {r: image for r, image in images.items() if image and all(images.values())}
    return rewrite(graph, new)


def _of_float32(reader: Tensor, copy: Tensor, w: Tensor, compute: Compute) -> Tensor | None:
    """What reads W in place of its copy, with the same result; None if nothing does."""
    assert reader.op is not None
    if reader.op is GET_ROWS:
        return cpy(cpy(GET_ROWS(w, reader.src[1]), BF16), F32)
    if reader.op.name not in _PRODUCTS:
        return None
    *first, matrix, rows = reader.src
    if matrix is not copy or copy in (*first, rows):
        return None
    op = _rounding(reader.op)
    KERNELS.setdefault(op, KERNELS[reader.op])
    node = op(*first, w, rows, rounds_w=True, **reader.params)
    if reader.is_write:
        node.base, node.offset = reader.base, reader.offset
    return node if _is_taken(node, compute) else None


@cache
def _rounding(op: Op) -> Op:
    """A product that rounds its matrix, of F32."""

    def ref(*arrays: np.ndarray, rounds_w: bool, **params: Any) -> np.ndarray:
        *first, w, rows = arrays
        rounded = dequantize(quantize(w.astype(np.float32), "BF16"), "BF16")
        return op.ref(*first, rounded, rows, **params)

    def spec(*src: Tensor, rounds_w: bool, **params: Any) -> Spec:
        return op.spec(*src, **params)

    return replace(op, spec=spec, ref=ref, grad=NO_GRAD)


def _in_bf16(t: Tensor, reads: tuple[int, ...], writes: tuple[int, ...] = ()) -> Tensor:
    """The node with BF16 in these places, by the kernel that its op has."""
    assert t.op is not None
    op: Op = bf16_op(t.op, reads, writes)
    KERNELS.setdefault(op, KERNELS[t.op])
    node = op(*t.src, **t.params)
    if t.is_write:
        node.base, node.offset = t.base, t.offset
    return node
