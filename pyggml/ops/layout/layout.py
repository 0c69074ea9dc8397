"""Copies, and views with other axes.

cont, dup   a gapless copy (of another type: pyggml.ops.layout.cpy)
reshape     a view: other axes, the same order      permute, transpose   a view: axes reordered
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.kernels.kernel import Site, cpu_kernel


def cont(x: Tensor) -> Tensor:
    """x without gaps: x itself if it has none, else a copy (ggml's CONT)."""
    return x if x.is_contiguous else CONT(x)


def dup(x: Tensor) -> Tensor:
    """A gapless copy of x of any type (ggml's DUP)."""
    return DUP(x)


def reshape(x: Tensor, shape: Shape) -> Tensor:
    """x with other axes, its elements in the same order (ggml's RESHAPE). One axis may be -1.

    The result is a view of x, or of a copy if x has gaps. A quantised x is cut between blocks.
    """
    shape = tuple(shape)
    if shape.count(-1) == 1:
        size = -prod(shape)
        shape = tuple(x.n_elements // size if n == -1 and size else n for n in shape)
    return RESHAPE(x, shape=shape)


def permute(x: Tensor, axes: Shape) -> Tensor:
    """A view of x whose axis i is x's axis axes[i], as np.transpose (ggml's PERMUTE)."""
    return PERMUTE(x, axes=tuple(axes))


def transpose(x: Tensor) -> Tensor:
    """A view of x with its last two axes exchanged (ggml's TRANSPOSE)."""
    return TRANSPOSE(x)


# -- cont, dup ----------------------------------------------------------------------------------


def _copy_run(site: Site) -> Call:
    """NumPy's strided copy. On rows without gaps no kernel is faster (0.3 ns a float, measured)."""
    return Call(np.copyto, site.out, site.src[0])


def _same_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy"""
    return (dy,)


def _copy_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5), (2, 1, 3, 4), (7,)]:
        yield Sample((rng.standard_normal(shape),))


CONT, DUP = (
    op(
        name=ggml.name.lower(),
        ggml=ggml,
        spec=lambda x: Spec(x.shape, x.dtype),
        ref=lambda x, **_: x.copy(),
        grad=_same_grad,
        samples=_copy_samples,
        strided=True,
    )
    for ggml in (GGMLOp.CONT, GGMLOp.DUP)
)
cpu_kernel(CONT, _copy_run)
cpu_kernel(DUP, _copy_run)

# -- reshape ------------------------------------------------------------------------------------


def _reshape_spec(x: Tensor, shape: Shape) -> Spec:
    fits = len(shape) <= 4 and min(shape, default=0) >= 0 and prod(shape) == x.n_elements
    if not fits:
        raise ShapeError(
            f"reshape: x is {x!r} of {x.n_elements} elements, wanted {list(shape)}"
            " (at most 4 axes, as many elements)"
        )
    if x.dtype.quantised and (not shape or shape[-1] % x.dtype.block):
        raise ShapeError(
            f"reshape: x is {x!r}, wanted a last axis of whole blocks, not {list(shape)}"
        )
    return Spec(shape, x.dtype)


def _reshape_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy, in x's shape"""
    return (reshape(dy, node.src[0].shape),)


def _reshape_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, new in [((1, 1), ()), ((3, 8), (2, 3, 4)), ((2, 3, 4, 5), (6, 20)), ((6,), (2, 3))]:
        yield Sample((rng.standard_normal(shape),), {"shape": new})


RESHAPE = op(
    name="reshape",
    ggml=GGMLOp.RESHAPE,
    spec=_reshape_spec,
    ref=lambda x, shape: x.reshape(shape),
    grad=_reshape_grad,
    samples=_reshape_samples,
    refuses={"shape": ((9999,), (-1, -5), (1,) * 5)},
    memory=Memory.VIEW,
)

# -- permute, transpose -------------------------------------------------------------------------


def _permuted_spec(x: Tensor, axes: Shape) -> Spec:
    return Spec(tuple(x.shape[a] for a in axes), x.dtype, tuple(x.strides[a] for a in axes))


def _permute_spec(x: Tensor, axes: Shape) -> Spec:
    n = len(x.shape)
    if sorted(axes) != list(range(n)) or n == 0:
        raise ShapeError(f"permute: x is {x!r}, wanted axes 0 to {n - 1} once each, not {axes}")
    if x.dtype.quantised and axes[-1] != n - 1:
        raise ShapeError(f"permute: x is {x!r}, whose blocks lie along the last axis, not {axes}")
    return _permuted_spec(x, axes)


def _permute_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy with its axes in the old order"""
    axes = node.params["axes"]
    return (permute(dy, tuple(axes.index(a) for a in range(len(axes)))),)


def _permute_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4, 5), (0, 2, 3, 1)), ((5,), (0,))]
    cases.append(((3, 1, 4, 2), tuple(rng.permutation(4).tolist())))
    for shape, axes in cases:
        yield Sample((rng.standard_normal(shape),), {"axes": axes})


PERMUTE = op(
    name="permute",
    ggml=GGMLOp.PERMUTE,
    spec=_permute_spec,
    ref=np.transpose,
    grad=_permute_grad,
    samples=_permute_samples,
    refuses={"axes": ((0, 0), (1, 2), (-1, 0))},
    memory=Memory.VIEW,
    strided=True,
)


def _transpose_spec(x: Tensor) -> Spec:
    n = len(x.shape)
    if n < 2 or x.dtype.quantised:
        raise ShapeError(f"transpose: x is {x!r}, wanted two or more axes and no blocks")
    return _permuted_spec(x, (*range(n - 2), n - 1, n - 2))


def _transpose_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dyᵀ"""
    return (transpose(dy),)


def _transpose_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5), (2, 1, 3, 4)]:
        yield Sample((rng.standard_normal(shape),))


TRANSPOSE = op(
    name="transpose",
    ggml=GGMLOp.TRANSPOSE,
    spec=_transpose_spec,
    ref=lambda x: np.swapaxes(x, -1, -2),
    grad=_transpose_grad,
    samples=_transpose_samples,
    memory=Memory.VIEW,
    strided=True,
)
