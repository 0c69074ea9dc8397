"""repeat: copies of x, side by side, that fill a shape. repeat_back: the sum of such tiles."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor, leaf
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.arithmetic.broadcast import (
    drawn_tiles,
    expect_tiles,
    four_axes,
    sum_tiles,
    tile_to,
    tiles,
)
from pyggml.ops.expect import expect_type


def repeat(x: Tensor, shape: Shape) -> Tensor:
    """x tiled to `shape`, each axis of which is a multiple of x's (ggml's REPEAT).

    x is of any type without blocks.
    """
    return REPEAT(x, shape=tuple(shape))


def repeat_back(x: Tensor, shape: Shape) -> Tensor:
    """The sum of x's tiles of `shape`, F32: the gradient of broadcasting."""
    return REPEAT_BACK(x, shape=tuple(shape))


def _tiles_run(code: Callable[..., None], site: Site) -> Call:
    """Call code(out, x), both with four axes."""
    arrays = (a.reshape(four_axes(a.shape)) for a in (site.out, site.src[0]))
    return Call(code, *(a.view(np.uint16) if a.itemsize == 2 else a for a in arrays))


@kernel
def _copy_tiles(out, x):
    for start in range(0, out.size, x.size):
        for c in range(x.size):
            out[start + c] = x[c]


@kernel
def _repeat(out, x):
    m0, m1, m2, _ = x.shape
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            for k in range(out.shape[2]):
                _copy_tiles(out[i, j, k], x[i % m0, j % m1, k % m2])


def _repeat_spec(x: Tensor, shape: Shape) -> Spec:
    if x.dtype.quantised:
        raise ShapeError(f"repeat: x is {x!r}, wanted a type without blocks")
    expect_tiles("repeat", "x", x, shape)
    return Spec(shape, x.dtype)


def _repeat_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = Σ over the copies of dy"""
    return (repeat_back(dy, node.src[0].shape),)


def _repeat_samples(rng: np.random.Generator) -> Iterator[Sample]:
    shapes = [((1, 1), (1, 1)), ((5,), (3, 5)), ((2, 1, 3), (2, 4, 6)), ((), (2, 3, 4, 5))]
    for small, large in [*shapes, drawn_tiles(rng)[::-1]]:
        yield Sample((np.asarray(rng.standard_normal(small)),), {"shape": large})
    for kind in (np.int32, np.int16, np.float16):
        yield Sample((leaf(rng.integers(-9, 9, (2, 1, 3)).astype(kind)),), {"shape": (2, 4, 6)})


REPEAT = op(
    name="repeat",
    ggml=GGMLOp.REPEAT,
    spec=_repeat_spec,
    ref=tile_to,
    grad=_repeat_grad,
    samples=_repeat_samples,
    refuses={"shape": ((-1, -1), (1,) * 5)},
)
cpu_kernel(REPEAT, partial(_tiles_run, _repeat))


@kernel
def _add_tiles(out, x):
    """out (m,) += the tiles of x (t · m,)."""
    if out.size == 1:
        total = np.float32(0)
        for c in range(x.size):
            total += x[c]
        out[0] += total
    else:
        for start in range(0, x.size, out.size):
            tile = x[start : start + out.size]
            for c in range(out.size):
                out[c] += tile[c]


@kernel
def _repeat_back(out, x):
    m0, m1, m2, _ = out.shape
    out[:] = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            for k in range(x.shape[2]):
                _add_tiles(out[i % m0, j % m1, k % m2], x[i, j, k])


def _repeat_back_spec(x: Tensor, shape: Shape) -> Spec:
    expect_type("repeat_back", "x", x)
    if not tiles(shape, x.shape):
        raise ShapeError(f"repeat_back: x is {x!r}, wanted axes that are multiples of {shape}")
    return Spec(shape)


def _repeat_back_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy, repeated"""
    return (repeat(dy, node.src[0].shape),)


def _repeat_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _repeat_samples(rng):
        if isinstance(s.arrays[0], np.ndarray):
            large = s.params["shape"]
            yield Sample((rng.standard_normal(large),), {"shape": s.arrays[0].shape})


REPEAT_BACK = op(
    name="repeat_back",
    ggml=GGMLOp.REPEAT_BACK,
    spec=_repeat_back_spec,
    ref=sum_tiles,
    grad=_repeat_back_grad,
    samples=_repeat_back_samples,
    refuses={"shape": ((9999,), (0, 0), (-1, -1))},
)
cpu_kernel(REPEAT_BACK, partial(_tiles_run, _repeat_back))
