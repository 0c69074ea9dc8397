"""The slopes of a loss along the scales of packed weights: du of rescale(w, u), at u = 0.

rescale_back(w, dw)              for each scale Σ dw · its part of w, over its block
rescale_back_rows(w, dy, ids)    the same for each row i, with row ids_i of w and dy_i as its slopes
rescale_back_out_prod(w, x, dy)  the same of dw = out_prod(x, dy), made tile by tile
rescale_back_out_prod_id         the same of dw = out_prod_id(x, dy, ids, E), of experts

w (…, N, K) as `rescale` takes it, dw of its shape; du (…, N, blocks of a row, scales of a block).
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import I32
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute, Site, as_rows, cpu_kernel
from pyggml.ops.expect import check_ids, expect, expect_axes, expect_type
from pyggml.ops.experts import OUT_PROD_ID, rows_by_expert, take_rows
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.ops.product.batches import Matrices, strided, strided_problem, transposed_matrices
from pyggml.quants import QUANTS
from pyggml.quants.scales import scale_places, scale_sums

TILE = 1 << 20  # numbers of dw that are there at a time
_SECOND_ORDER = NoGrad("second derivatives are out of scope")
SAMPLES = ("Q8_0", (3, 64), 5), ("Q4_0", (40, 32), 2), ("Q5_0", (1, 96), 1)


def rescale_back(w: Tensor, dw: Tensor) -> Tensor:
    """d(loss)/du at u = 0, given dw of w's shape."""
    return RESCALE_BACK(w, dw)


def rescale_back_rows(w: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
    """(T, blocks of a row, scales of a block): the same of rows ids (T,) I32 of w (N, K), each with
    slopes of its own, dy (T, K)."""
    return RESCALE_BACK_ROWS(w, dy, ids)


def rescale_back_out_prod(w: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    """`rescale_back` given the factors of dw = dyᵀ·x: w (N, K), x (T, K), dy (T, N)."""
    return RESCALE_BACK_OUT_PROD(w, x, dy)


def rescale_back_out_prod_id(w: Tensor, x: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
    """`rescale_back` given those of dw = out_prod_id(x, dy, ids, E): w (E, N, K)."""
    return RESCALE_BACK_OUT_PROD_ID(w, x, dy, ids)


def scales_of(name: str, w: Tensor) -> Shape:
    """The shape of u: (…, N, blocks of a row, scales of a block). `name` is the op's."""
    if len(w.shape) < 2 or w.dtype.name not in QUANTS or not len(scale_places(w.dtype.name)):
        raise ShapeError(f"{name}: w is {w!r}, wanted a matrix of blocks with float16 scales")
    n_blocks = w.shape[-1] // w.dtype.block
    return (*w.shape[:-1], n_blocks, len(scale_places(w.dtype.name)))


def ref_slopes(w: np.ndarray, dw: np.ndarray) -> np.ndarray:
    """Of blocks of 32 with one scale, as the samples have."""
    return (w * dw).reshape(*w.shape[:-1], w.shape[-1] // 32, -1).sum(-1, keepdims=True)


# -- rescale_back -------------------------------------------------------------------------------


def _back_spec(w: Tensor, dw: Tensor) -> Spec:
    shape = scales_of("rescale_back", w)
    expect("rescale_back", "dw", dw, w.shape)
    return Spec(shape)


def _back_run(site: Site) -> Call:
    w, dw = site.src
    return Call(scale_sums, w, dw, site.node.src[0].dtype.name, site.out)


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, _ in SAMPLES:
        yield Sample((packed_leaf(rng, shape, name), rng.standard_normal(shape)))


RESCALE_BACK = op(
    name="rescale_back",
    spec=_back_spec,
    ref=ref_slopes,
    grad=_SECOND_ORDER,
    samples=_back_samples,
)
cpu_kernel(RESCALE_BACK, _back_run)

# -- rescale_back_rows --------------------------------------------------------------------------


def _rows_spec(w: Tensor, dy: Tensor, ids: Tensor) -> Spec:
    name = "rescale_back_rows"
    expect_axes(name, "w", w, 2)
    expect_axes(name, "ids", ids, 1)
    expect_type(name, "ids", ids, I32)
    expect(name, "dy", dy, (*ids.shape, w.shape[1]))
    return Spec((*ids.shape, *scales_of(name, w)[1:]))


def _sums_of_rows(
    out: np.ndarray, w: np.ndarray, dy: np.ndarray, ids: np.ndarray, name: str
) -> None:
    check_ids("rescale_back_rows", ids, len(w))
    scale_sums(w[ids], dy, name, out)


def _rows_run(site: Site) -> Call:
    return Call(_sums_of_rows, site.out, *site.src, site.node.src[0].dtype.name)


def _rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, (n, k), t in SAMPLES:
        ids = rng.integers(0, n, t, np.int32)
        yield Sample((packed_leaf(rng, (n, k), name), rng.standard_normal((t, k)), ids))


RESCALE_BACK_ROWS = op(
    name="rescale_back_rows",
    spec=_rows_spec,
    ref=lambda w, dy, ids: ref_slopes(w[ids], dy),
    grad=_SECOND_ORDER,
    samples=_rows_samples,
    fuses=("get_rows_back", "rescale_back"),
)
cpu_kernel(RESCALE_BACK_ROWS, _rows_run)

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


def _rows_of_tile(n: int, k: int) -> int:
    return max(1, min(n, TILE // max(k, 1)))


def _layout(node: Tensor) -> tuple[Layout, int]:
    """The scratch, and the rows of a tile."""
    n, k = node.src[0].shape
    step = _rows_of_tile(n, k)
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


def _product_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, (n, k), t in SAMPLES:
        factors = rng.standard_normal((t, k)), rng.standard_normal((t, n))
        yield Sample((packed_leaf(rng, (n, k), name), *factors))


RESCALE_BACK_OUT_PROD = op(
    name="rescale_back_out_prod",
    spec=_product_spec,
    ref=lambda w, x, dy: ref_slopes(w, dy.T @ x),
    grad=_SECOND_ORDER,
    samples=_product_samples,
    strided=True,
    costly=True,
    fuses=("out_prod", "rescale_back"),
)
cpu_kernel(RESCALE_BACK_OUT_PROD, _product_run, scratch=_product_scratch)

# -- rescale_back_out_prod_id -------------------------------------------------------------------


def _experts_spec(w: Tensor, x: Tensor, dy: Tensor, ids: Tensor) -> Spec:
    name = "rescale_back_out_prod_id"
    expect_axes(name, "w", w, 3)
    dw = OUT_PROD_ID.spec(x, dy, ids, n_expert=w.shape[0])
    if dw.shape != w.shape:
        raise ShapeError(f"{name}: w is {w!r}, wanted the shape of x and dy, {dw.shape}")
    return Spec(scales_of(name, w))


def _experts_problem(node: Tensor, n: int, n_rows: int) -> gemm.Problem:
    """Some rows of an expert, of so many tokens."""
    k = node.src[0].shape[-1]
    return gemm.Problem("strided", n, k, n_rows, a_in_columns=True, b_in_columns=True)


def _experts_layout(node: Tensor) -> tuple[Layout, int]:
    """The scratch, and the rows of an expert in a tile."""
    _, n, k = node.src[0].shape
    t, step = max(node.src[3].shape[0], 1), _rows_of_tile(n, k)
    sizes = {step, n % step or step}
    size = max(gemm.scratch_bytes(_experts_problem(node, rows, t)) for rows in sizes)
    layout = Layout(
        x=Array((t, k)),
        dy=Array((t, n)),
        tile=Array((step, k)),
        sums=Array((step, *node.shape[2:])),
        product=Array((size,), np.uint8),
    )
    return layout, step


def _experts_scratch(node: Tensor, compute: Compute) -> int:
    return _experts_layout(node)[0].n_bytes


def _experts_run(site: Site) -> Call:
    w, x, dy, ids = site.src
    layout, step = _experts_layout(site.node)
    scratch = layout.cut(site.scratch)
    rows = as_rows(x), as_rows(dy)
    return Call(_by_expert, site.out, site.node, w, rows, ids, scratch, step)


def _by_expert(
    out: np.ndarray,
    node: Tensor,
    w: np.ndarray,
    rows: tuple[np.ndarray, np.ndarray],
    ids: np.ndarray,
    scratch: Scratch,
    step: int,
) -> None:
    out.fill(0)
    for expert, own in rows_by_expert("rescale_back_out_prod_id", ids, len(w)):
        x = take_rows(rows[0], own, ids.size, scratch["x"]).T[None]
        dy = take_rows(rows[1], own, ids.size, scratch["dy"]).T[None]
        for first in range(0, w.shape[1], step):
            part = slice(first, min(first + step, w.shape[1]))
            n = part.stop - first
            tile, sums = scratch["tile"][:n], scratch["sums"][:n]
            o = gemm.Operands(tile[None], dy[:, part], x, scratch["product"], accumulate=False)
            gemm.call_of(_experts_problem(node, n, len(own)), o)()
            scale_sums(w[expert, part], tile, node.src[0].dtype.name, sums)
            out[expert, part] += sums


def _experts_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for (name, (n, k), t), same in zip(SAMPLES, (False, True, False), strict=True):
        ids = np.array([rng.permutation(4)[:2] for _ in range(t)], np.int32)
        x, dy = (rng.standard_normal((t, u, m)) for u, m in ((1 if same else 2, k), (2, n)))
        yield Sample((packed_leaf(rng, (4, n, k), name), x, dy, ids))


RESCALE_BACK_OUT_PROD_ID = op(
    name="rescale_back_out_prod_id",
    spec=_experts_spec,
    ref=lambda w, x, dy, ids: ref_slopes(w, OUT_PROD_ID.ref(x, dy, ids, n_expert=len(w))),
    grad=_SECOND_ORDER,
    samples=_experts_samples,
    costly=True,
    fuses=("out_prod_id", "rescale_back"),
)
cpu_kernel(RESCALE_BACK_OUT_PROD_ID, _experts_run, scratch=_experts_scratch)
