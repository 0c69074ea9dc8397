"""Products with one weight per expert: row (t, u) is multiplied with expert ids[t, u] of E.

mul_mat_id        y[t, u]  = x[t, u] · w[e]ᵀ            e = ids[t, u], w (E, N, K) of any type
mul_mat_id_back   dx[t, u] = dy[t, u] · w[e]
out_prod_id       dw[e]    = Σ dy[t, u]ᵀ · x[t, u]      over all (t, u) with ids[t, u] = e
add_id            y[t, u]  = x[t, u] + b[e]

The rows of one expert are multiplied together, so that its weight is unpacked once, and those of
all experts in one launch (pyggml.kernels.gemm.by_expert); NumPy's products run one by one. Experts
without rows are not read. The ids are data: they are checked when the graph runs, before any expert
is read.
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DTYPES, I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Op, Sample, Spec, op
from pyggml.graph.tensor import Tensor, leaf
from pyggml.jit import kernel
from pyggml.jit.scratch import Array, Layout
from pyggml.kernels import gemm
from pyggml.kernels.gemm.by_expert import Family, ProductsByExpert
from pyggml.kernels.gemm.by_expert import layout as at_once
from pyggml.kernels.kernel import Compute, Site, as_rows, cpu_kernel
from pyggml.ops.expect import check_ids, expect, expect_axes, expect_type
from pyggml.ops.layout.rows import get_rows_back
from pyggml.quants import QUANTS, quantize


def mul_mat_id(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """(T, U, N): w (E, N, K) of any type, x (T, U, K) or (T, 1, K) F32, ids (T, U) I32.

    ggml's MUL_MAT_ID. With (T, 1, K) all U experts of a token get the same row. The kernel raises
    PyggmlError if an id is no expert.
    """
    return MUL_MAT_ID(w, x, ids)


def mul_mat_id_back(w: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
    """d(loss)/dx (T, U, K) of mul_mat_id, given dy (T, U, N) and its w (E, N, K) of any type."""
    return MUL_MAT_ID_BACK(w, dy, ids)


def out_prod_id(x: Tensor, dy: Tensor, ids: Tensor, n_expert: int) -> Tensor:
    """d(loss)/dw (n_expert, N, K) of mul_mat_id, given its x and dy (T, U, N)."""
    return OUT_PROD_ID(x, dy, ids, n_expert=n_expert)


def add_id(x: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """x (T, U, N) + b (E, N)[ids (T, U)], F32 and I32 (ggml's ADD_ID)."""
    return ADD_ID(x, b, ids)


# -- how rows find their expert -----------------------------------------------------------------


def _check(op_name: str, x: Tensor, ids: Tensor) -> None:
    expect_type(op_name, "ids", ids, I32)
    expect_axes(op_name, "ids", ids, 2)
    expect_axes(op_name, "rows", x, 3)
    n_tokens, n_used = ids.shape
    rows = (n_tokens, 1 if x.shape[1] == 1 else n_used)
    expect(op_name, "rows", x, (*rows, x.shape[2]))


def _check_weight(op_name: str, w: Tensor, depth: int, axis: int) -> None:
    expect_axes(op_name, "w", w, 3)
    if w.dtype.name not in QUANTS:
        raise ShapeError(f"{op_name}: rows of {w!r} cannot be unpacked")
    if w.shape[axis] != depth:
        raise ShapeError(
            f"{op_name} with {w.name or 'experts'}: rows of {depth} numbers do not fit {w!r}"
        )


def rows_by_expert(
    op_name: str, ids: np.ndarray, n_expert: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(expert, its row numbers in rising order), at most T rows at a time.

    A router names an expert at most once per token, so an expert commonly has T rows or fewer.
    Other ids may give it more; it then comes several times.
    """
    check_ids(op_name, ids, n_expert)
    flat, most = ids.reshape(-1), ids.shape[0]
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=n_expert))
    for expert in np.unique(flat):
        start = ends[expert - 1] if expert else 0
        for first in range(start, ends[expert], most):
            yield int(expert), order[first : min(first + most, ends[expert])]


def take_rows(x: np.ndarray, rows: np.ndarray, n_rows: int, out: np.ndarray) -> np.ndarray:
    """Copy rows of x (R, n) to `out`. R divides n_rows: one row of x stands for n_rows / R rows."""
    part = out[: len(rows)]
    np.take(x, rows // (n_rows // len(x)), axis=0, out=part, mode="clip")
    return part


def _layout(n_tokens: int, n: int, m: int, n_bytes: int) -> Layout:
    """Scratch for one expert: its rows (n_tokens, n), their results (n_tokens, m), a product's."""
    first, second = Array((n_tokens, n)), Array((n_tokens, m))
    return Layout(first=first, second=second, product=Array((n_bytes,), np.uint8))


# -- products with the experts' weights ---------------------------------------------------------


def _kernel_by_expert(declared: Op, form: gemm.Form) -> None:
    """Declare the kernel that multiplies each row of the second source with its expert."""

    def family(node: Tensor, compute: Compute) -> Family:
        w, x, ids = node.src
        most = max(ids.shape[0], 1)
        return Family(form, node.shape[-1], x.shape[-1], most, w.dtype, compute)

    def layout(node: Tensor, compute: Compute) -> Layout:
        w, ids = node.src[0], node.src[2]
        of = family(node, compute)
        joined = at_once(of, ids.n_elements, w.shape[0])
        if joined is not None:
            return joined
        # Enough for an expert that every token chooses.
        p = of.problem(of.most)
        return _layout(of.most, of.k, of.n, gemm.scratch_bytes(p, fewer_rows=True))

    def run(site: Site) -> Call:
        w, x, ids = site.src
        of = family(site.node, site.compute)
        scratch = layout(site.node, site.compute).cut(site.scratch)
        out, rows = as_rows(site.out), as_rows(x)
        if "jobs" in scratch:
            products = ProductsByExpert(of, ids, rows, out, w, scratch)
            return Call(_at_once, declared.name, products, ids, len(w))
        return Call(_by_expert, declared.name, of, out, rows, ids, w, *scratch.values())

    cpu_kernel(declared, run, scratch=lambda node, compute: layout(node, compute).n_bytes)


def _at_once(name: str, products: ProductsByExpert, ids: np.ndarray, n_expert: int) -> None:
    if not products.run():
        check_ids(name, ids, n_expert)


def _by_expert(
    name: str,
    of: Family,
    out: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray,
    w: np.ndarray,
    gathered: np.ndarray,
    results: np.ndarray,
    scratch: np.ndarray,
) -> None:
    for expert, rows in rows_by_expert(name, ids, len(w)):
        part, result = take_rows(x, rows, ids.size, gathered), results[: len(rows)]
        o = gemm.Operands(result, part, w[expert], scratch, accumulate=False)
        gemm.call_of(of.problem(len(rows)), o)()
        out[rows] = result


# -- mul_mat_id ---------------------------------------------------------------------------------


def _mul_mat_id_spec(w: Tensor, x: Tensor, ids: Tensor) -> Spec:
    _check("mul_mat_id", x, ids)
    _check_weight("mul_mat_id", w, x.shape[2], axis=2)
    return Spec((*ids.shape, w.shape[1]))


def _mul_mat_id_ref(w: np.ndarray, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    every = np.broadcast_to(x, (*ids.shape, x.shape[2]))
    return np.asarray((w[ids] @ every[..., None])[..., 0])


def _mul_mat_id_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dW_e = Σ dy_i·x_iᵀ over the tokens of expert e, dx_i = W_eᵀ·dy_i"""
    w, x, ids = node.src
    return out_prod_id(x, dy, ids, w.shape[0]), mul_mat_id_back(w, dy, ids), None


def _cases(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """(w, ids, whether all experts of a token get the same row)."""
    for e, n, k, t, u, same in [
        *((1, 1, 1, 1, 1, True), (3, 5, 7, 1, 2, True), (4, 70, 33, 13, 2, False)),
        *((8, 6, 40, 30, 3, True), (2, 4, 600, 5, 2, False)),
    ]:
        order = rng.permuted(np.tile(np.arange(e), (t, 1)), axis=1)
        yield rng.standard_normal((e, n, k)), order[:, :u].astype(np.int32), same
    twice = np.array([[1, 1], [0, 0], [1, 1]], np.int32)  # an expert named twice, one never
    yield rng.standard_normal((3, 4, 6)), twice, False


def _mul_mat_id_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for w, ids, same in _cases(rng):
        rows = (ids.shape[0], 1 if same else ids.shape[1])
        yield Sample((w, rng.standard_normal((*rows, w.shape[2])), ids))
    packed = leaf(quantize(rng.standard_normal((4, 5, 64)), "Q8_0"), "w", DTYPES["Q8_0"])
    ids = np.array([[3, 1], [1, 0], [3, 0]], np.int32)
    yield Sample((packed, rng.standard_normal((3, 1, 64)), ids))


MUL_MAT_ID = op(
    name="mul_mat_id",
    ggml=GGMLOp.MUL_MAT_ID,
    spec=_mul_mat_id_spec,
    ref=_mul_mat_id_ref,
    grad=_mul_mat_id_grad,
    samples=_mul_mat_id_samples,
    costly=True,
)
_kernel_by_expert(MUL_MAT_ID, "mul_mat")

# -- mul_mat_id_back ----------------------------------------------------------------------------


def _mul_mat_id_back_spec(w: Tensor, dy: Tensor, ids: Tensor) -> Spec:
    _check("mul_mat_id_back", dy, ids)
    _check_weight("mul_mat_id_back", w, dy.shape[2], axis=1)
    return Spec((*ids.shape, w.shape[2]))


def _mul_mat_id_back_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """dW_e = Σ dy_i·g_iᵀ over the tokens of expert e, ddy_i = W_e·g_i"""
    w, dy, ids = node.src
    return out_prod_id(g, dy, ids, w.shape[0]), mul_mat_id(w, g, ids), None


def _mul_mat_id_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for w, ids, _ in _cases(rng):
        yield Sample((w, rng.standard_normal((*ids.shape, w.shape[1])), ids))


MUL_MAT_ID_BACK = op(
    name="mul_mat_id_back",
    spec=_mul_mat_id_back_spec,
    ref=lambda w, dy, ids: _mul_mat_id_ref(w.swapaxes(1, 2), dy, ids),
    grad=_mul_mat_id_back_grad,
    samples=_mul_mat_id_back_samples,
    costly=True,
)
_kernel_by_expert(MUL_MAT_ID_BACK, "out_prod")

# -- out_prod_id --------------------------------------------------------------------------------


def _out_prod_id_spec(x: Tensor, dy: Tensor, ids: Tensor, n_expert: int) -> Spec:
    _check("out_prod_id", x, ids)
    expect("out_prod_id", "dy", dy, (*ids.shape, *dy.shape[-1:]))
    return Spec((n_expert, dy.shape[2], x.shape[2]))


def _out_prod_id_family(node: Tensor) -> Family:
    x, dy, ids = node.src
    return Family("strided", dy.shape[-1], x.shape[-1], max(ids.shape[0], 1))


def _out_prod_id_layout(node: Tensor) -> Layout:
    ids, of = node.src[2], _out_prod_id_family(node)
    joined = at_once(of, ids.n_elements, node.shape[0])
    if joined is not None:
        return joined
    return _layout(ids.shape[0], of.k, of.n, gemm.scratch_bytes(of.problem(of.most)))


def _out_prod_id_run(site: Site) -> Call:
    x, dy, ids = site.src
    scratch = _out_prod_id_layout(site.node).cut(site.scratch)
    rows = as_rows(dy), as_rows(x)
    of = _out_prod_id_family(site.node)
    if "jobs" in scratch:
        products = ProductsByExpert(of, ids, *rows, site.out, scratch)
        return Call(_sums_at_once, site.out, products, ids)
    return Call(_sums, of, site.out, *rows, ids, *scratch.values())


def _sums_at_once(dw: np.ndarray, products: ProductsByExpert, ids: np.ndarray) -> None:
    dw.fill(0)
    _at_once("out_prod_id", products, ids, len(dw))


def _sums(
    of: Family,
    dw: np.ndarray,
    dy: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray,
    gathered_x: np.ndarray,
    gathered_dy: np.ndarray,
    scratch: np.ndarray,
) -> None:
    dw.fill(0)
    for expert, rows in rows_by_expert("out_prod_id", ids, len(dw)):
        right = take_rows(x, rows, ids.size, gathered_x).T[None]
        left = take_rows(dy, rows, ids.size, gathered_dy).T[None]
        o = gemm.Operands(dw[expert : expert + 1], left, right, scratch, accumulate=True)
        gemm.call_of(of.problem(len(rows)), o)()


def _out_prod_id_ref(x: np.ndarray, dy: np.ndarray, ids: np.ndarray, n_expert: int) -> np.ndarray:
    dw = np.zeros((n_expert, dy.shape[2], x.shape[2]))
    np.add.at(dw, ids, dy[..., :, None] * x[..., None, :])
    return dw


def _out_prod_id_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """dx_i = g_eᵀ·dy_i, ddy_i = g_e·x_i"""
    x, dy, ids = node.src
    return mul_mat_id_back(g, dy, ids), mul_mat_id(g, x, ids), None


def _out_prod_id_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for w, ids, same in _cases(rng):
        n_expert, n, k = w.shape
        x = rng.standard_normal((ids.shape[0], 1 if same else ids.shape[1], k))
        yield Sample((x, rng.standard_normal((*ids.shape, n)), ids), {"n_expert": n_expert})


OUT_PROD_ID = op(
    name="out_prod_id",
    spec=_out_prod_id_spec,
    ref=_out_prod_id_ref,
    grad=_out_prod_id_grad,
    samples=_out_prod_id_samples,
    refuses={"n_expert": (-1,)},
    costly=True,
)
cpu_kernel(OUT_PROD_ID, _out_prod_id_run, scratch=lambda node, _: _out_prod_id_layout(node).n_bytes)

# -- add_id -------------------------------------------------------------------------------------


def _add_id_spec(x: Tensor, b: Tensor, ids: Tensor) -> Spec:
    _check("add_id", x, ids)
    expect_axes("add_id", "b", b, 2)
    expect("add_id", "x", x, (*ids.shape, b.shape[1]))
    expect_type("add_id", "b", b)
    return Spec(x.shape)


@kernel
def _add_rows(y, x, b, ids):
    for i in range(x.shape[0]):
        to, of, row = y[i], x[i], b[ids[i]]
        for j in range(of.size):
            to[j] = of[j] + row[j]


def _add_id(y: np.ndarray, x: np.ndarray, b: np.ndarray, ids: np.ndarray) -> None:
    check_ids("add_id", ids, len(b))
    _add_rows(y, x, b, ids)


def _add_id_run(site: Site) -> Call:
    x, b, ids = site.src
    y, rows = as_rows(site.out), as_rows(x)
    return Call(_add_id, y, rows, b, ids.reshape(-1))


def _add_id_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy, db_e = Σ dy_i over the tokens of expert e"""
    _, b, ids = node.src
    return dy, get_rows_back(dy, ids, b.shape[0]), None


def _add_id_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for w, ids, _ in _cases(rng):
        yield Sample((rng.standard_normal((*ids.shape, w.shape[1])), w[:, :, 0], ids))


ADD_ID = op(
    name="add_id",
    ggml=GGMLOp.ADD_ID,
    spec=_add_id_spec,
    ref=lambda x, b, ids: np.asarray(x + b[ids]),
    grad=_add_id_grad,
    samples=_add_id_samples,
    memory=Memory.INPLACE_FIRST,
)
cpu_kernel(ADD_ID, _add_id_run)
