"""Packed weights whose blocks' scales change: w of any type with float16 scales d (quants.scales).

rescale(w, u)    w with d·(1 + u) in place of each d, rounded to float16

w (…, N, K), u (…, N, blocks of a row, scales of a block). Gradients go straight through the
rounding: they are those of d·(1 + u) itself (pyggml.ops.product.scale_slopes).
"""

from collections.abc import Iterator

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.op import Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.arithmetic.arith import ADD, add
from pyggml.ops.expect import expect
from pyggml.ops.experts import OUT_PROD_ID
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.ops.layout.layout import reshape
from pyggml.ops.layout.rows import GET_ROWS_BACK, get_rows_back
from pyggml.ops.loss.head_back import LINEAR_CROSS_ENTROPY_BACK_W, rescale_back_linear_cross_entropy
from pyggml.ops.product.matmul import OUT_PROD, OUT_PROD_ADD
from pyggml.ops.product.scale_slopes import (
    SAMPLES,
    rescale_back,
    rescale_back_out_prod,
    rescale_back_out_prod_id,
    rescale_back_rows,
    scales_of,
)
from pyggml.quants.scales import rescale as rescale_blocks


def rescale(w: Tensor, u: Tensor) -> Tensor:
    """w (…, N, K), packed, with scales d·(1 + u); u as `scales_of` says. ShapeError for other
    shapes, and for a type whose blocks have no float16 scales."""
    return RESCALE(w, u)


def slopes_of(w: Tensor, dw: Tensor) -> Tensor:
    """d(loss)/du of rescale(w, u), given the node dw, which is not computed where its own sources
    do: a product, rows put into zeros, or a sum of such."""
    if dw.op is ADD:
        return add(slopes_of(w, dw.src[0]), slopes_of(w, dw.src[1]))
    if dw.op is OUT_PROD_ADD and len(dw.shape) == 2:
        return add(slopes_of(w, dw.src[0]), rescale_back_out_prod(w, *dw.src[1:]))
    if dw.op is OUT_PROD and len(dw.shape) == 2:
        return rescale_back_out_prod(w, *dw.src)
    if dw.op is OUT_PROD_ID:
        return rescale_back_out_prod_id(w, *dw.src)
    if dw.op is GET_ROWS_BACK and len(dw.shape) == 2 and dw.src[1].dtype is I32:
        dy, ids = reshape(dw.src[0], (-1, w.shape[1])), reshape(dw.src[1], (-1,))
        of_rows = rescale_back_rows(w, dy, ids)
        n = of_rows.shape[1] * of_rows.shape[2]
        total = get_rows_back(reshape(of_rows, (-1, n)), ids, w.shape[0])
        return reshape(total, (w.shape[0], *of_rows.shape[1:]))
    if dw.op is LINEAR_CROSS_ENTROPY_BACK_W:
        return rescale_back_linear_cross_entropy(w, dw)
    return rescale_back(w, dw)


def _spec(w: Tensor, u: Tensor) -> Spec:
    expect("rescale", "u", u, scales_of("rescale", w))
    return Spec(w.shape, w.dtype)


def _run(site: Site) -> Call:
    w, u = site.src
    return Call(rescale_blocks, w, u, site.node.dtype.name, site.out)


def _ref(w: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Of blocks with one scale."""
    blocks = w.reshape(*u.shape[:-1], -1)
    return (blocks * (1 + u)).reshape(w.shape)


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor]:
    """du = Σ dy · its part of w"""
    return None, slopes_of(node.src[0], dy)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, _ in SAMPLES:
        w = packed_leaf(rng, shape, name)
        yield Sample((w, 0.1 * rng.standard_normal(scales_of("rescale", w))))


RESCALE = op(
    name="rescale",
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
)
cpu_kernel(RESCALE, _run)
