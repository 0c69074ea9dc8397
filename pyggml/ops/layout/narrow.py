"""Cutting along one axis, and joining.

narrow        a range of one axis, a view
narrow_back   its transpose: zeros, with dy in that range
concat        a, then b, along one axis
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import expect_type
from pyggml.ops.layout.cpy import packed_leaf


def narrow(x: Tensor, axis: int, start: int, size: int) -> Tensor:
    """x[..., start : start + size, ...] on one axis, a view (ggml_view with an offset)."""
    return NARROW(x, axis=_axis_from_front("narrow", x, axis), start=start, size=size)


def split(x: Tensor, sizes: tuple[int, ...], axis: int = -1) -> tuple[Tensor, ...]:
    """x cut along one axis into views of these sizes, which must fill it."""
    axis = _axis_from_front("split", x, axis)
    if sum(sizes) != x.shape[axis]:
        raise ShapeError(f"split: sizes {sizes} do not fill axis {axis} of {x!r}")
    return tuple(narrow(x, axis, sum(sizes[:i]), n) for i, n in enumerate(sizes))


def halve(x: Tensor) -> tuple[Tensor, Tensor]:
    """x cut in the middle of its last axis into two views."""
    n = x.shape[-1] if x.shape else 0
    if n % 2:
        raise ShapeError(f"halve: x is {x!r}, wanted an even last axis")
    first, second = split(x, (n // 2, n // 2))
    return first, second


def concat(a: Tensor, b: Tensor, axis: int = -1) -> Tensor:
    """a and b joined along one axis; types and other axes are equal (ggml's CONCAT)."""
    return CONCAT(a, b, axis=_axis_from_front("concat", a, axis))


def _axis_from_front(name: str, x: Tensor, axis: int) -> int:
    """The axis counted from the front; ShapeError if x has no such axis."""
    n = len(x.shape)
    if not -n <= axis < n:
        raise ShapeError(f"{name}: {x!r} has no axis {axis}")
    return axis % n


# -- narrow -------------------------------------------------------------------------------------


def _narrow_spec(x: Tensor, axis: int, start: int, size: int) -> Spec:
    n = x.shape[axis] if 0 <= axis < len(x.shape) else 0
    inside = 0 <= axis < len(x.shape) and 0 <= start <= start + size <= n
    if not inside:
        raise ShapeError(
            f"narrow: {start} to {start + size} (size {size}) of axis {axis} does not lie "
            f"inside {x!r}"
        )
    block = x.dtype.block if axis == len(x.shape) - 1 else 1
    if start % block or size % block:
        raise ShapeError(f"narrow: {start} to {start + size} of {x!r} cuts a block of {block}")
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return Spec(shape, x.dtype, x.strides, start // block * x.strides[axis])


def _slice_of(a: np.ndarray, axis: int, start: int, size: int) -> np.ndarray:
    return a[(*(slice(None),) * axis, slice(start, start + size))]


def _narrow_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy where it was read, else 0"""
    p = node.params
    axis = p["axis"]
    return (NARROW_BACK(dy, axis=axis, start=p["start"], size=node.src[0].shape[axis]),)


def _narrow_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), 1, 0, 1), ((3, 8), 1, 2, 5), ((4, 3, 5), 1, 1, 2), ((6, 2, 3, 2), 0, 3, 3)]
    axis, start = rng.integers(0, (4, 5)).tolist()
    cases.append(((5, 5, 5, 5), axis, start, int(rng.integers(1, 6 - start))))
    for shape, axis, start, size in cases:
        yield Sample((rng.standard_normal(shape),), {"axis": axis, "start": start, "size": size})


NARROW = op(
    name="narrow",
    ggml=GGMLOp.VIEW,
    spec=_narrow_spec,
    ref=_slice_of,
    grad=_narrow_grad,
    samples=_narrow_samples,
    refuses={"axis": (-1, 9), "start": (-1, 999), "size": (-1, 999)},
    memory=Memory.VIEW,
    strided=True,
)


def _inset(before: np.ndarray, inside: np.ndarray, after: np.ndarray, dy: np.ndarray) -> None:
    before.fill(0)
    np.copyto(inside, dy)
    after.fill(0)


def _narrow_back_run(site: Site) -> Call:
    (dy,) = site.src
    axis, start, size = (site.node.params[k] for k in ("axis", "start", "size"))
    end = start + dy.shape[axis]
    ranges = ((0, start), (start, end - start), (end, size - end))
    return Call(_inset, *(_slice_of(site.out, axis, *r) for r in ranges), dy)


def _narrow_back_spec(dy: Tensor, axis: int, start: int, size: int) -> Spec:
    """`size` is the length of the axis in the result."""
    expect_type("narrow_back", "dy", dy)
    if not 0 <= axis < len(dy.shape) or not 0 <= start <= size - dy.shape[axis]:
        raise ShapeError(f"narrow_back: {dy!r} at {start} does not fit axis {axis} of {size}")
    return Spec((*dy.shape[:axis], size, *dy.shape[axis + 1 :]))


def _narrow_back_ref(dy: np.ndarray, axis: int, start: int, size: int) -> np.ndarray:
    margins = [(0, 0)] * dy.ndim
    margins[axis] = (start, size - start - dy.shape[axis])
    return np.pad(dy, margins)


def _narrow_back_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = the part of dy that was set"""
    axis = node.params["axis"]
    return (narrow(dy, axis, node.params["start"], node.src[0].shape[axis]),)


def _narrow_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), 1, 0, 1), ((3, 5), 1, 2, 8), ((2, 3, 4), 0, 1, 4), ((5,), 0, 1, 6)]
    axis, start, after = rng.integers(0, (3, 5, 5)).tolist()
    cases.append(((2, 2, 2), axis, start, start + 2 + after))
    for shape, axis, start, size in cases:
        yield Sample((rng.standard_normal(shape),), {"axis": axis, "start": start, "size": size})


NARROW_BACK = op(
    name="narrow_back",
    spec=_narrow_back_spec,
    ref=_narrow_back_ref,
    grad=_narrow_back_grad,
    samples=_narrow_back_samples,
    refuses={"axis": (-1, 9), "start": (-1, 999), "size": (0, -1)},
    strided=True,
)
cpu_kernel(NARROW_BACK, _narrow_back_run)

# -- concat -------------------------------------------------------------------------------------


def _join(left: np.ndarray, right: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    np.copyto(left, a)
    np.copyto(right, b)


def _concat_run(site: Site) -> Call:
    """Two strided copies: a to its range of the result, then b to its own; blocks are bytes."""
    a, b = site.src
    axis = site.node.params["axis"]
    left = _slice_of(site.out, axis, 0, a.shape[axis])
    right = _slice_of(site.out, axis, a.shape[axis], b.shape[axis])
    return Call(_join, left, right, a, b)


def _concat_spec(a: Tensor, b: Tensor, axis: int) -> Spec:
    alike = a.dtype is b.dtype and len(a.shape) == len(b.shape) > axis >= 0
    if not alike or any(
        n != m for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if i != axis
    ):
        raise ShapeError(f"concat: {a!r} and {b!r} do not join along axis {axis}")
    return Spec((*a.shape[:axis], a.shape[axis] + b.shape[axis], *a.shape[axis + 1 :]), a.dtype)


def _concat_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da, db = the parts of dy"""
    axis = node.params["axis"]
    return split(dy, tuple(s.shape[axis] for s in node.src), axis)


def _concat_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), (1, 1), 0), ((3, 5), (3, 8), 1), ((2, 3, 5), (2, 1, 5), 1), ((4,), (1,), 0)]
    drawn = int(rng.integers(0, 3))
    left, right = [2, 3, 4], [2, 3, 4]
    left[drawn], right[drawn] = rng.integers(1, 7, 2).tolist()
    for a, b, axis in [*cases, (tuple(left), tuple(right), drawn)]:
        yield Sample((rng.standard_normal(a), rng.standard_normal(b)), {"axis": axis})
    for axis in (0, 2):
        whole = packed_leaf(rng, (2, 3, 64), "Q8_0")
        yield Sample((whole, packed_leaf(rng, (2, 3, 64), "Q8_0")), {"axis": axis})


CONCAT = op(
    name="concat",
    ggml=GGMLOp.CONCAT,
    spec=_concat_spec,
    ref=lambda a, b, axis: np.concatenate((a, b), axis),
    grad=_concat_grad,
    samples=_concat_samples,
    refuses={"axis": (-1, 9)},
    strided=True,
)
cpu_kernel(CONCAT, _concat_run)
