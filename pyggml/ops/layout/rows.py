"""Rows read from a table by their numbers. Those that are written into one: set_rows.py.

get_rows        y[b, i]             = table[b, ids[b, i]], unpacked to float32
get_rows_back   dtable[b, j]        = Σ dy[b, i] over all i with ids[b, i] = j; …_add: + table[b, j]

b stands for any number of batch axes, or none. Ids with fewer batches are repeated. Ids are data,
known only when the graph runs: the kernel checks them before it reads a row.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, I32, DType
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op, widen
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import JIT, BlockCode, kernel
from pyggml.kernels.gemm.microkernel import call_block
from pyggml.kernels.kernel import Site, cpu_kernel, onto_first
from pyggml.ops.expect import expect
from pyggml.ops.layout.row_numbers import (
    by_shares,
    check_batch,
    expect_ids,
    ids_by_batch,
    row_numbers,
)
from pyggml.quants import QUANTS, UNPACK


def get_rows(table: Tensor, ids: Tensor) -> Tensor:
    """(*batch, *m, n) F32: the rows of table (*batch, n_rows, n), of any type, that ids name.

    ids (*batch, *m) I32 or I64; its first axes may also divide those of the batch (ggml GET_ROWS).
    An I32 table gives I32 rows. The kernel raises PyggmlError if an id is no row of the table.
    """
    return GET_ROWS(table, ids)


def get_rows_back(dy: Tensor, ids: Tensor, n_rows: int, batch: Shape = ()) -> Tensor:
    """(*batch, n_rows, n) F32: d(loss)/d(table) of get_rows, given dy (*batch, *m, n).

    dy may be F16 or BF16 too; the sums are F32.
    """
    return GET_ROWS_BACK(widen(dy), ids, n_rows=n_rows, batch=tuple(batch))


# -- get_rows -----------------------------------------------------------------------------------


def _get_rows_spec(table: Tensor, ids: Tensor) -> Spec:
    expect_ids("get_rows", ids)
    if len(table.shape) < 2:
        raise ShapeError(f"get_rows: table is {table!r}, wanted 2 or more axes")
    *batch, _, n = table.shape
    check_batch("get_rows", ids, tuple(batch))
    if table.dtype.name not in QUANTS and table.dtype is not I32:
        raise ShapeError(f"get_rows: rows of {table!r} cannot be unpacked")
    shape = (*batch, *ids.shape[len(batch) :], n)
    return Spec(shape, I32 if table.dtype is I32 else F32)


@kernel
def _gather(out, table, numbers, unpack, n_blocks, first, end):
    for i in range(first, end):
        call_block(unpack, out[i].ctypes.data, table[numbers[i]].ctypes.data, n_blocks)


def _gather_task(arguments, task, thread):
    out, table, ids, unpack, n_blocks, per = arguments[0]
    _gather(out, table, ids, unpack, n_blocks, task * per, min(task * per + per, ids.size))


def gather_rows(
    out: np.ndarray,
    table: np.ndarray,
    ids: np.ndarray,
    batch: Shape,
    unpack: BlockCode,
    n_blocks: int,
) -> None:
    """out = the rows `ids` of a table of bytes, unpacked."""
    numbers = row_numbers("get_rows", ids, batch, len(table) // prod(batch))
    if JIT:
        _gather(out, table, numbers, unpack.address, n_blocks, 0, numbers.size)
    else:
        for row, i in zip(out, numbers, strict=True):
            unpack(row, table[i], n_blocks)


def _unpacker(dtype: DType) -> BlockCode:
    """I32 numbers are copied as 32 bits, like F32."""
    return UNPACK["F32" if dtype is I32 else dtype.name]


def _get_rows_run(site: Site) -> Call:
    table, ids = site.src
    dtype = site.node.src[0].dtype
    n = site.node.shape[-1]
    packed = table.view(np.uint8).reshape(-1, dtype.row_bytes(n))
    out, n_blocks = site.out.view(np.float32).reshape(-1, n), n // dtype.block
    batch, unpack = table.shape[:-2], _unpacker(dtype)
    whole = Call(gather_rows, out, packed, ids, batch, unpack, n_blocks)
    if batch or not JIT or not ids.flags.c_contiguous:
        return whole
    arrays = out, packed, ids.reshape(-1), unpack.address, n_blocks
    return by_shares(_gather_task, arrays, len(packed), False, whole)


def _get_rows_ref(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    batch = table.shape[:-2]
    y = np.empty((*batch, *ids.shape[len(batch) :], table.shape[-1]), table.dtype)
    for b, own in ids_by_batch(ids, batch):
        y[b] = table[b][own]
    return y


def _get_rows_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dtable_r = Σ dy_i over all i with ids_i = r"""
    table, ids = node.src
    if table.dtype is I32:
        return None, None
    return get_rows_back(dy, ids, table.shape[-2], table.shape[:-2]), None


def _get_rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, ids in [((1, 1), [0]), ((6, 33), [5, 0, 0, 3]), ((4, 8), [[1, 2], [1, 1]])]:
        yield Sample((rng.standard_normal(shape), np.array(ids, np.int32)))
    batched: list[tuple[Shape, Shape]] = [((3, 5, 1), (3, 2)), ((2, 3, 4, 6), (2, 1, 7))]
    for table, shape_of_ids in batched:
        drawn = rng.integers(0, table[-2], shape_of_ids, np.int32)
        yield Sample((rng.standard_normal(table), drawn))


GET_ROWS = op(
    name="get_rows",
    ggml=GGMLOp.GET_ROWS,
    spec=_get_rows_spec,
    ref=_get_rows_ref,
    grad=_get_rows_grad,
    samples=_get_rows_samples,
)
cpu_kernel(GET_ROWS, _get_rows_run)

# -- get_rows_back ------------------------------------------------------------------------------


def _get_rows_back_spec(dy: Tensor, ids: Tensor, n_rows: int, batch: Shape) -> Spec:
    expect_ids("get_rows_back", ids)
    check_batch("get_rows_back", ids, batch)
    expect("get_rows_back", "dy", dy, (*batch, *ids.shape[len(batch) :], *dy.shape[-1:]))
    return Spec((*batch, n_rows, dy.shape[-1]))


@kernel
def _add_rows(table, dy, numbers):
    """Add the rows in the order of ids, so that the sum is the same in every run."""
    table[:] = 0
    for i in range(numbers.size):
        row, part = table[numbers[i]], dy[i]
        for j in range(part.size):
            row[j] += part[j]


def _scatter(table: np.ndarray, dy: np.ndarray, ids: np.ndarray, batch: Shape, n_rows: int) -> None:
    _add_rows(table, dy, row_numbers("get_rows_back", ids, batch, n_rows))


def _get_rows_back_run(site: Site) -> Call:
    dy, ids = site.src[-2:]
    n = dy.shape[-1]
    p = site.node.params
    return Call(_scatter, site.out.reshape(-1, n), dy.reshape(-1, n), ids, p["batch"], p["n_rows"])


def _get_rows_back_ref(dy: np.ndarray, ids: np.ndarray, n_rows: int, batch: Shape) -> np.ndarray:
    table = np.zeros((*batch, n_rows, dy.shape[-1]))
    for b, own in ids_by_batch(ids, batch):
        np.add.at(table[b], own, dy[b])
    return table


def _get_rows_back_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """ddy_i = g_{ids_i}"""
    return get_rows(g, node.src[1]), None


def _get_rows_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _get_rows_samples(rng):
        table, ids = s.arrays
        *batch, n_rows, n = table.shape
        dy = rng.standard_normal((*batch, *ids.shape[len(batch) :], n))
        yield Sample((dy, ids), {"n_rows": n_rows, "batch": tuple(batch)})


GET_ROWS_BACK = op(
    name="get_rows_back",
    ggml=GGMLOp.GET_ROWS_BACK,
    spec=_get_rows_back_spec,
    ref=_get_rows_back_ref,
    grad=_get_rows_back_grad,
    samples=_get_rows_back_samples,
    refuses={"n_rows": (-1,), "batch": ((9999,), (0, 0))},
)
cpu_kernel(GET_ROWS_BACK, _get_rows_back_run)

# -- get_rows_back_add --------------------------------------------------------------------------


def _get_rows_back_add_spec(
    table: Tensor, dy: Tensor, ids: Tensor, n_rows: int, batch: Shape
) -> Spec:
    spec = _get_rows_back_spec(dy, ids, n_rows, batch)
    expect("get_rows_back_add", "table", table, spec.shape)
    return spec


@kernel
def _add_sums(table, dy, numbers, order, total):
    """table[r] += Σ dy[i] over all i with numbers[i] = r, which `order` has beside each other."""
    i = 0
    while i < order.size:
        row = numbers[order[i]]
        total[:] = 0
        while i < order.size and numbers[order[i]] == row:
            part = dy[order[i]]
            for j in range(part.size):
                total[j] += part[j]
            i += 1
        to = table[row]
        for j in range(to.size):
            to[j] += total[j]


def _scatter_sums(
    table: np.ndarray, dy: np.ndarray, ids: np.ndarray, batch: Shape, n_rows: int,
    total: np.ndarray, keeps: np.ndarray | bool,
) -> None:  # fmt: skip
    if not keeps:
        table.fill(0)
    numbers = row_numbers("get_rows_back_add", ids, batch, n_rows)
    _add_sums(table, dy, numbers, np.argsort(numbers, kind="stable"), total)


def _get_rows_back_add_run(site: Site) -> Call:
    """With a further source before dy, it says whether the table is added to."""
    *_, keeps = True, *site.src[1:-2]
    dy, ids = site.src[-2:]
    n, p = dy.shape[-1], site.node.params
    arrays = site.out.reshape(-1, n), dy.reshape(-1, n), ids
    total = site.scratch.view(np.float32)[:n]
    call = Call(_scatter_sums, *arrays, p["batch"], p["n_rows"], total, keeps)
    return onto_first(site, call)


def _get_rows_back_add_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """dtable = g, ddy_i = g_{ids_i}"""
    return g, get_rows(g, node.src[2]), None


def _get_rows_back_add_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _get_rows_back_samples(rng):
        dy, _ = s.arrays
        shape = *s.params["batch"], s.params["n_rows"], dy.shape[-1]
        yield Sample((rng.standard_normal(shape), *s.arrays), s.params)


GET_ROWS_BACK_ADD = op(
    name="get_rows_back_add",
    spec=_get_rows_back_add_spec,
    ref=lambda table, *arrays, **params: table + _get_rows_back_ref(*arrays, **params),
    grad=_get_rows_back_add_grad,
    samples=_get_rows_back_add_samples,
    refuses={"n_rows": (-1,), "batch": ((9999,), (0, 0))},
    memory=Memory.INPLACE_FIRST,
)
cpu_kernel(
    GET_ROWS_BACK_ADD,
    _get_rows_back_add_run,
    scratch=lambda node, compute: 4 * node.shape[-1],
)
