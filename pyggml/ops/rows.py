"""Rows picked out of a table by number, and rows written into one.

get_rows        y[i]        = table[ids[i]], unpacked to float32
get_rows_back   dtable[j]   = Σ dy[i] over all i with ids[i] = j
set_rows        dst[ids[i]] = src[i], in dst's own memory

The ids are data, known only when the graph runs: they are checked then, before any row is touched.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml._jit import BlockCode
from pyggml.dtypes import F16, F32, I32
from pyggml.errors import PyggmlError, ShapeError
from pyggml.ggml_enums import GGMLOp
from pyggml.ops.expect import expect, expect_axes, expect_gapless, expect_type
from pyggml.ops.layout import dup, reshape
from pyggml.quants import QUANTS
from pyggml.tensor import PLAIN, Call, Memory, Sample, Site, Spec, Tensor, op, zeros


def get_rows(table: Tensor, ids: Tensor) -> Tensor:
    """(*ids.shape, n) F32: the rows of table (n_rows, n), of any type, that ids (I32) name.

    Running it raises PyggmlError if an id is not a row of the table.
    """
    return GET_ROWS(table, ids)


def get_rows_back(dy: Tensor, ids: Tensor, n_rows: int) -> Tensor:
    """(n_rows, n) F32: d(loss)/d(table) of get_rows, dy (*ids.shape, n); others 0."""
    return GET_ROWS_BACK(dy, ids, n_rows=n_rows)


def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> Tensor:
    """dst (n_rows, ...) F32 or F16 with src (n, ...) F32 written to the rows ids (n,) I32 name.

    The result is dst's memory: who needs the new rows must read the result, not dst, so that it
    runs later. Running it raises PyggmlError if an id is no row of dst or is named twice.
    """
    expect_gapless("set_rows", "dst", dst)
    return SET_ROWS(dst, src, ids)


def _check_ids(op_name: str, ids: np.ndarray, n_rows: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= n_rows):
        wrong = ids[(ids < 0) | (ids >= n_rows)].reshape(-1)[0]
        raise PyggmlError(f"{op_name}: id {wrong} is none of the {n_rows} rows")


# -- get_rows -----------------------------------------------------------------------------------


def _get_rows_spec(table: Tensor, ids: Tensor) -> Spec:
    expect_axes("get_rows", "table", table, 2)
    expect_type("get_rows", "ids", ids, I32)
    if table.dtype.name not in QUANTS:
        raise ShapeError(f"get_rows: rows of {table!r} cannot be unpacked")
    return Spec((*ids.shape, table.shape[1]))


def _gather(
    out: np.ndarray, table: np.ndarray, ids: np.ndarray, unpack: BlockCode, n_blocks: int
) -> None:
    _check_ids("get_rows", ids, table.shape[0])
    for row, i in zip(out, ids, strict=True):
        unpack(row, table[i], n_blocks)


def _get_rows_run(site: Site) -> Call:
    table, ids = site.src
    dtype = site.node.src[0].dtype
    n = site.node.shape[-1]
    out, packed = site.out.reshape(ids.size, n), table.view(np.uint8)
    return _gather, (out, packed, ids.reshape(-1), QUANTS[dtype.name].unpack, n // dtype.block)


def _get_rows_ref(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.asarray(table[ids])


def _get_rows_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    table, ids = node.src
    return get_rows_back(dy, ids, table.shape[0]), None


def _get_rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, ids in [((1, 1), [0]), ((6, 33), [5, 0, 0, 3]), ((4, 8), [[1, 2], [1, 1]])]:
        yield Sample((rng.standard_normal(shape), np.array(ids, np.int32)))


GET_ROWS = op(
    name="get_rows",
    ggml=GGMLOp.GET_ROWS,
    spec=_get_rows_spec,
    run=_get_rows_run,
    ref=_get_rows_ref,
    grad=_get_rows_grad,
    samples=_get_rows_samples,
    memory=Memory.FRESH,
    needs=PLAIN,
)

# -- get_rows_back ------------------------------------------------------------------------------


def _get_rows_back_spec(dy: Tensor, ids: Tensor, n_rows: int) -> Spec:
    expect_type("get_rows_back", "ids", ids, I32)
    expect("get_rows_back", "dy", dy, (*ids.shape, *dy.shape[-1:]))
    return Spec((n_rows, dy.shape[-1]))


def _scatter(table: np.ndarray, dy: np.ndarray, ids: np.ndarray) -> None:
    """In the order of ids, so that the sum is the same in every run."""
    _check_ids("get_rows_back", ids, table.shape[0])
    table.fill(0)
    for row, i in zip(dy, ids, strict=True):
        table[i] += row


def _get_rows_back_run(site: Site) -> Call:
    dy, ids = site.src
    return _scatter, (site.out, dy.reshape(ids.size, dy.shape[-1]), ids.reshape(-1))


def _get_rows_back_ref(dy: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray:
    table = np.zeros((n_rows, dy.shape[-1]))
    np.add.at(table, ids, dy)
    return table


def _get_rows_back_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    return get_rows(g, node.src[1]), None


def _get_rows_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _get_rows_samples(rng):
        table, ids = s.arrays
        dy = rng.standard_normal((*ids.shape, table.shape[1]))
        yield Sample((dy, ids), {"n_rows": table.shape[0]})


GET_ROWS_BACK = op(
    name="get_rows_back",
    ggml=GGMLOp.GET_ROWS_BACK,
    spec=_get_rows_back_spec,
    run=_get_rows_back_run,
    ref=_get_rows_back_ref,
    grad=_get_rows_back_grad,
    samples=_get_rows_back_samples,
    memory=Memory.FRESH,
    needs=PLAIN,
)

# -- set_rows -----------------------------------------------------------------------------------


def _set_rows_spec(dst: Tensor, src: Tensor, ids: Tensor) -> Spec:
    if dst.dtype not in (F32, F16):
        raise ShapeError(f"set_rows: dst is {dst!r}, wanted F32 or F16")
    expect_type("set_rows", "ids", ids, I32)
    expect_axes("set_rows", "ids", ids, 1)
    expect("set_rows", "src", src, (*ids.shape, *dst.shape[1:]))
    return Spec(dst.shape, dst.dtype)


def _overwrite(dst: np.ndarray, src: np.ndarray, ids: np.ndarray) -> None:
    _check_ids("set_rows", ids, dst.shape[0])
    numbers, counts = np.unique(ids, return_counts=True)
    if numbers.size < ids.size:
        raise PyggmlError(f"set_rows: id {numbers[counts > 1][0]} is named twice")
    dst[ids] = src


def _set_rows_run(site: Site) -> Call:
    _, src, ids = site.src
    return _overwrite, (site.out, src, ids)


def _set_rows_ref(dst: np.ndarray, src: np.ndarray, ids: np.ndarray) -> np.ndarray:
    out = dst.copy()
    out[ids] = src
    return out


def _set_rows_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """src's is what arrived at its rows, dst's what arrived at all others."""
    _, src, ids = node.src
    n_rows = dy.shape[0]
    flat_dy = reshape(dy, (n_rows, dy.n_elements // n_rows))
    return (
        set_rows(dup(dy), zeros(src.shape, F32), ids),
        reshape(get_rows(flat_dy, ids), src.shape),
        None,
    )


def _set_rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, ids in [((1, 1), [0]), ((6, 33), [5, 0, 3]), ((4, 2, 8), [1, 2])]:
        src = rng.standard_normal((len(ids), *shape[1:]))
        yield Sample((rng.standard_normal(shape), src, np.array(ids, np.int32)))


SET_ROWS = op(
    name="set_rows",
    ggml=GGMLOp.SET_ROWS,
    spec=_set_rows_spec,
    run=_set_rows_run,
    ref=_set_rows_ref,
    grad=_set_rows_grad,
    samples=_set_rows_samples,
    memory=Memory.ALIAS,
    needs=PLAIN,
)
