"""Packed weights whose blocks' scales change: w of any type with float16 scales d (quants.scales).

rescale(w, u)                    w with d·(1 + u) in place of each d, rounded to float16
rescale_back(w, dw)              du: for each scale Σ dw · its part of w, over its block
rescale_back_out_prod(w, x, dy)  the same of dw = out_prod(x, dy), made tile by tile

w (…, N, K), u (…, N, blocks of a row, scales of a block). Gradients go straight through the
rounding: they are those of d·(1 + u) itself.
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit.scratch import Array, Layout
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.expect import expect, expect_axes
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.ops.product.batches import Matrices, strided, strided_problem, transposed_matrices
from pyggml.ops.product.matmul import OUT_PROD
from pyggml.quants import QUANTS
from pyggml.quants.scales import rescale as rescale_blocks
from pyggml.quants.scales import scale_places, scale_sums

_TILE = 1 << 20  # numbers of dw that are there at a time
_SECOND_ORDER = NoGrad("second derivatives are out of scope")
_SAMPLES = ("Q8_0", (3, 64), 5), ("Q4_0", (40, 32), 2), ("Q5_0", (1, 96), 1)


def rescale(w: Tensor, u: Tensor) -> Tensor:
    """w (…, N, K), packed, with scales d·(1 + u); u as `scales_of` says. ShapeError for other
    shapes, and for a type whose blocks have no float16 scales."""
    return RESCALE(w, u)


def rescale_back(w: Tensor, dw: Tensor) -> Tensor:
    """d(loss)/du at u = 0, given dw of w's shape."""
    return RESCALE_BACK(w, dw)


def rescale_back_out_prod(w: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    """The same given the factors of dw = dyᵀ·x: w (N, K), x (T, K), dy (T, N)."""
    return RESCALE_BACK_OUT_PROD(w, x, dy)


def scales_of(name: str, w: Tensor) -> Shape:
    """The shape of u: (…, N, blocks of a row, scales of a block). `name` is the op's."""
    if len(w.shape) < 2 or w.dtype.name not in QUANTS or not len(scale_places(w.dtype.name)):
        raise ShapeError(f"{name}: w is {w!r}, wanted a matrix of blocks with float16 scales")
    n_blocks = w.shape[-1] // w.dtype.block
    return (*w.shape[:-1], n_blocks, len(scale_places(w.dtype.name)))


def _ref_slopes(w: np.ndarray, dw: np.ndarray, u_shape: Shape) -> np.ndarray:
    return (w * dw).reshape(*u_shape[:-1], -1).sum(-1, keepdims=True)


# -- rescale ------------------------------------------------------------------------------------


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
    w = node.src[0]
    if dy.op is OUT_PROD and len(dy.shape) == 2:
        return None, rescale_back_out_prod(w, *dy.src)
    return None, rescale_back(w, dy)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, _ in _SAMPLES:
        w = packed_leaf(rng, shape, name)
        yield Sample((w, 0.1 * rng.standard_normal(scales_of("rescale", w))))


RESCALE = op(
    name="rescale",
    ggml=GGMLOp.CUSTOM,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
)
cpu_kernel(RESCALE, _run)

# -- rescale_back -------------------------------------------------------------------------------


def _back_spec(w: Tensor, dw: Tensor) -> Spec:
    shape = scales_of("rescale_back", w)
    expect("rescale_back", "dw", dw, w.shape)
    return Spec(shape)


def _back_run(site: Site) -> Call:
    w, dw = site.src
    return Call(scale_sums, w, dw, site.node.src[0].dtype.name, site.out)


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, _ in _SAMPLES:
        yield Sample((packed_leaf(rng, shape, name), rng.standard_normal(shape)))


def _block(w: np.ndarray) -> int:
    """For references: the weights of a block of the samples' types, which is 32 for all."""
    return w.shape[-1] // 32


def _back_ref(w: np.ndarray, dw: np.ndarray) -> np.ndarray:
    return _ref_slopes(w, dw, (*w.shape[:-1], _block(w), 1))


RESCALE_BACK = op(
    name="rescale_back",
    ggml=GGMLOp.CUSTOM,
    spec=_back_spec,
    ref=_back_ref,
    grad=_SECOND_ORDER,
    samples=_back_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
)
cpu_kernel(RESCALE_BACK, _back_run)

# -- rescale_back_out_prod ----------------------------------------------------------------------


def _product_spec(w: Tensor, x: Tensor, dy: Tensor) -> Spec:
    name = "rescale_back_out_prod"
    expect_axes(name, "w", w, 2)
    expect_axes(name, "x", x, 2)
    n, k = w.shape
    expect(name, "x", x, (x.shape[0], k))
    expect(name, "dy", dy, (x.shape[0], n))
    return Spec(scales_of(name, w))


def _problem(node: Tensor, n_rows: int) -> gemm.Problem:
    """The product for a tile of so many rows."""
    _, x, dy = node.src
    whole = transposed_matrices(dy)
    rows = Matrices((n_rows, whole.shape[1]), whole.strides)
    return strided_problem((n_rows, x.shape[1]), rows, transposed_matrices(x))


def _layout(node: Tensor) -> tuple[Layout, int]:
    """The scratch, and the rows of a tile."""
    n, k = node.src[0].shape
    step = max(1, min(n, _TILE // max(k, 1)))
    size = max(gemm.scratch_bytes(_problem(node, rows)) for rows in (step, n % step or step))
    return Layout(tile=Array((step, k)), product=Array((size,), np.uint8)), step


def _product_scratch(node: Tensor, compute: Compute) -> int:
    return _layout(node)[0].n_bytes


def _product_run(site: Site) -> Call:
    w, x, dy = site.src
    layout, step = _layout(site.node)
    scratch = layout.cut(site.scratch)
    name, calls = site.node.src[0].dtype.name, []
    for first in range(0, len(w), step):
        rows = slice(first, min(first + step, len(w)))
        tile = scratch["tile"][: rows.stop - first]
        p, work = _problem(site.node, len(tile)), scratch["product"]
        calls.append(strided(p, tile, dy.T[rows], x.T, work, accumulate=False))
        calls.append(Call(scale_sums, w[rows], tile, name, site.out[rows]))
    return Call(one_by_one, calls)


def _product_ref(w: np.ndarray, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _back_ref(w, dy.T @ x)


def _product_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, (n, k), t in _SAMPLES:
        factors = rng.standard_normal((t, k)), rng.standard_normal((t, n))
        yield Sample((packed_leaf(rng, (n, k), name), *factors))


RESCALE_BACK_OUT_PROD = op(
    name="rescale_back_out_prod",
    ggml=GGMLOp.CUSTOM,
    spec=_product_spec,
    ref=_product_ref,
    grad=_SECOND_ORDER,
    samples=_product_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    strided=True,
    costly=True,
    fuses=("out_prod", "rescale_back"),
)
cpu_kernel(RESCALE_BACK_OUT_PROD, _product_run, scratch=_product_scratch)
