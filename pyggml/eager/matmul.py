"""a @ b as one node, with NumPy's meaning: matrices over the last two axes, batches before them.

da = dy @ bᵀ    db = aᵀ @ dy    each summed over the batches that it was repeated for

The engine's product is with a transpose, `mul_mat(w, x)` = x·wᵀ, as ggml's. A schedule makes a
`matmul` of it, of a transpose, and of copies where batches are repeated.
"""

from collections.abc import Iterator

import numpy as np

from pyggml import ops
from pyggml.errors import ShapeError
from pyggml.graph.op import Op, Sample, Spec
from pyggml.graph.tensor import Shape, Tensor


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """NumPy's a @ b, F32. A vector is a row as the first and a column as the second factor."""
    return MATMUL(a, b)


def _spec(a: Tensor, b: Tensor) -> Spec:
    if not a.shape or not b.shape:
        raise ShapeError(f"matmul: shapes {a.shape} and {b.shape}, wanted an axis at least")
    rows, columns = _as_matrices(a.shape, b.shape)
    if rows[-1] != columns[-2]:
        raise ShapeError(
            f"matmul: shapes {a.shape} and {b.shape}: {rows[-1]} columns of the first, "
            f"{columns[-2]} rows of the second, wanted as many"
        )
    kept = [n for n, shape in ((rows[-2], a.shape), (columns[-1], b.shape)) if len(shape) > 1]
    return Spec((*_batch(a, b), *kept))


def _as_matrices(a: Shape, b: Shape) -> tuple[Shape, Shape]:
    """The shapes with a vector as a row or a column."""
    return (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b


def _batch(a: Tensor, b: Tensor) -> Shape:
    """The axes before those of the matrices."""
    try:
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ShapeError(f"matmul: shapes {a.shape} and {b.shape} do not broadcast") from None


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy @ bᵀ, db = aᵀ @ dy"""
    a, b = node.src
    rows, columns = map(_reshape, node.src, _as_matrices(a.shape, b.shape))
    batch = _batch(a, b)
    dy = _reshape(dy, (*batch, rows.shape[-2], columns.shape[-1]))
    da, db = matmul(dy, ops.transpose(columns)), matmul(ops.transpose(rows), dy)
    if len(a.shape) == 1:
        da = ops.reshape(da, (*batch, *a.shape))
    if len(b.shape) == 1:
        db = ops.reshape(db, (*batch, *b.shape))
    return da, db


def _made_of(a: Tensor, b: Tensor) -> Tensor:
    """The node of the engine's product, of a copy of bᵀ."""
    rows, columns = map(_reshape, (a, b), _as_matrices(a.shape, b.shape))
    turned, batch = ops.cont(ops.transpose(columns)), _batch(a, b)
    rows, turned = (_repeat_to(t, (*batch, *t.shape[-2:])) for t in (rows, turned))
    return _reshape(ops.mul_mat(turned, rows), _spec(a, b).shape)


def _reshape(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else ops.reshape(x, shape)


def _repeat_to(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else ops.repeat(x, shape)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for a, b in [((2, 3), (3, 4)), ((3,), (5, 3, 2)), ((4, 1, 2, 3), (3,))]:
        yield Sample((rng.standard_normal(a), rng.standard_normal(b)))


MATMUL = Op(
    name="matmul",
    spec=_spec,
    ref=np.matmul,
    grad=_grad,
    samples=_samples,
    strided=True,
    costly=True,
    made_of=_made_of,
)
