"""Rows written into a table by their numbers: dst[b, ids[b, i]] = src[b, i], in dst's own memory.

Batch axes b and ids are as of get_rows (pyggml.ops.layout.rows). The kernel checks ids before it
writes a row.
"""

from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, DTYPES, F16, F32, Q8_0, DType
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor, leaf, zeros
from pyggml.jit import JIT, kernel
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.expect import expect, expect_gapless
from pyggml.ops.layout.cpy import cpy
from pyggml.ops.layout.layout import dup, reshape
from pyggml.ops.layout.row_numbers import (
    are_rows,
    by_shares,
    check_batch,
    expect_ids,
    ids_by_batch,
    row_numbers,
)
from pyggml.ops.layout.rows import get_rows
from pyggml.quants import QUANTS, NoPack, Quant, quantize
from pyggml.quants.bits import float_to_bf16, float_to_f16
from pyggml.quants.types.blocks32 import pack_q8_0


def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> Tensor:
    """dst (*batch, n_rows, *row) of any type that is written, with src (*batch, m, *row) in `ids`.

    src is F32, F16 or BF16. ids (*batch, m) I32 or I64; all axes but its last are those of batches,
    repeated where they divide dst's (ggml SET_ROWS). For an F16 or BF16 dst, src is rounded to
    nearest, ties to even; in F16 it becomes infinity from 65520 on. For a quantised dst, it is
    packed as ggml's reference does; in types but Q8_0 it must be finite.
    The result is a view of dst's memory. Nodes that need the new rows must read the result, not
    dst: then they run later. The kernel raises PyggmlError if an id is no row of dst, or is there
    twice, which ggml leaves undefined.
    """
    expect_gapless("set_rows", "dst", dst)
    if src.dtype in (F16, BF16):
        src = cpy(src, F32)
    return SET_ROWS(dst, src, ids)


def _set_rows_spec(dst: Tensor, src: Tensor, ids: Tensor) -> Spec:
    written = QUANTS.get(dst.dtype.name)
    pack = None if written is None else written.pack
    if pack is None or isinstance(pack, NoPack):
        reason = "" if pack is None else f", but {pack.reason}"
        raise ShapeError(f"set_rows: dst is {dst!r}, wanted a type that is written{reason}")
    expect_ids("set_rows", ids)
    n_batch = len(ids.shape) - 1
    if not 0 <= n_batch < len(dst.shape):
        raise ShapeError(f"set_rows: ids is {ids!r}, wanted 1 to {len(dst.shape)} axes")
    batch, row = dst.shape[:n_batch], dst.shape[n_batch + 1 :]
    check_batch("set_rows", ids, batch)
    if prod(row) % dst.dtype.block:
        raise ShapeError(f"set_rows: rows of {prod(row)} numbers of {dst!r} share blocks")
    expect("set_rows", "src", src, (*batch, ids.shape[-1], *row))
    return Spec(dst.shape, dst.dtype)


@kernel
def _put_same(dst, src, numbers, first, end):
    """dst[numbers[i]] = src[i] for i = first … end − 1."""
    for i in range(first, end):
        row, part = dst[numbers[i]], src[i]
        for j in range(part.size):
            row[j] = part[j]


@kernel
def _put_f16(dst, src, numbers, first, end):
    """As _put_same, with src rounded to F16, ties to even; dst holds the bits."""
    for i in range(first, end):
        row, part = dst[numbers[i]], src[i]
        for j in range(part.size):
            row[j] = float_to_f16(part[j])


@kernel
def _put_bf16(dst, src, numbers, first, end):
    """As _put_same, with src rounded to BF16, ties to even; dst holds the bits."""
    for i in range(first, end):
        row, part = dst[numbers[i]], src[i]
        for j in range(part.size):
            row[j] = float_to_bf16(part[j])


@kernel
def _put_q8_0(dst, src, numbers, first, end):
    """As _put_same, with src quantised; dst holds the bytes."""
    for i in range(first, end):
        pack_q8_0(dst[numbers[i]].reshape(-1, 34), src[i].reshape(-1, 32))


def _same_task(arguments, task, thread):
    dst, src, ids, per = arguments[0]
    _put_same(dst, src, ids, task * per, min(task * per + per, ids.size))


def _f16_task(arguments, task, thread):
    dst, src, ids, per = arguments[0]
    _put_f16(dst, src, ids, task * per, min(task * per + per, ids.size))


def _bf16_task(arguments, task, thread):
    dst, src, ids, per = arguments[0]
    _put_bf16(dst, src, ids, task * per, min(task * per + per, ids.size))


def _q8_0_task(arguments, task, thread):
    dst, src, ids, per = arguments[0]
    _put_q8_0(dst, src, ids, task * per, min(task * per + per, ids.size))


def _overwrite(
    put: Callable[..., None], dst: np.ndarray, src: np.ndarray, ids: np.ndarray, batch: Shape,
    n_rows: int,
) -> None:  # fmt: skip
    """Write the rows. Ids commonly rise, which proves them valid; others are checked one by one."""
    numbers = ids
    if batch or not are_rows(ids, n_rows, True):
        numbers = row_numbers("set_rows", ids, batch, n_rows)
        distinct, counts = np.unique(numbers, return_counts=True)
        if distinct.size < numbers.size:
            raise PyggmlError(f"set_rows: id {distinct[counts > 1][0] % n_rows} is named twice")
    put(dst, src, numbers, 0, len(src))


@kernel
def _all_within(src, limit):
    for i in range(src.shape[0]):
        for j in range(src.shape[1]):
            if not abs(src[i, j]) <= limit:
                return False
    return True


def _pack_and_put(
    q: Quant, packed: np.ndarray, dst: np.ndarray, src: np.ndarray, ids: np.ndarray, batch: Shape,
    n_rows: int,
) -> None:  # fmt: skip
    """Pack the rows, then write their bytes. Many are packed by all threads, and what does not fit
    is named by `quantize`."""
    if src.size > _AT_ONCE or not _all_within(src, np.float32(q.limit)):
        packed[...] = quantize(src, q.dtype.name)
    else:
        assert not isinstance(q.pack, NoPack)
        q.pack(packed.reshape(-1, q.dtype.block_bytes), src.reshape(-1, q.dtype.block))
    _overwrite(_put_same, dst, packed, ids, batch, n_rows)


def _is_packed_first(dtype: DType) -> bool:
    return dtype not in _WRITERS


def _set_rows_scratch(node: Tensor, compute: Compute) -> int:
    """The rows, packed."""
    src, kind = node.src[1], node.dtype
    return src.n_elements // kind.block * kind.block_bytes if _is_packed_first(kind) else 0


def _set_rows_run(site: Site) -> Call:
    _, src, ids = site.src
    shape = site.out.shape
    batch, n_rows, row = shape[: ids.ndim - 1], shape[ids.ndim - 1], prod(shape[ids.ndim :])
    dst = site.out.reshape(prod(batch) * n_rows, row)
    src = src.reshape(prod(batch) * ids.shape[-1], prod(src.shape[ids.ndim :]))
    kind, where = site.node.dtype, (ids, batch, n_rows)
    if _is_packed_first(kind):
        packed = site.scratch[: len(src) * row].reshape(len(src), row)
        return Call(_pack_and_put, QUANTS[kind.name], packed, dst, src, *where)
    dst, (put, task) = dst.view(np.uint16) if kind is F16 else dst, _WRITERS[kind]
    whole = Call(_overwrite, put, dst, src, *where)
    if batch or not JIT:
        return whole
    return by_shares(task, (dst, src, ids), n_rows, True, whole)


_WRITERS: dict[DType, tuple[Callable[..., None], Callable[..., None]]] = {
    F32: (_put_same, _same_task),
    F16: (_put_f16, _f16_task),
    BF16: (_put_bf16, _bf16_task),
    Q8_0: (_put_q8_0, _q8_0_task),
}
_AT_ONCE = 1 << 15  # numbers that one thread packs


def _set_rows_ref(dst: np.ndarray, src: np.ndarray, ids: np.ndarray) -> np.ndarray:
    out = dst.copy()
    for b, own in ids_by_batch(ids, dst.shape[: ids.ndim - 1]):
        out[b][own] = src[b]
    return out


def _set_rows_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dsrc_i = dy_{ids_i}, ddst = dy, but 0 in the rows that were set"""
    _, src, ids = node.src
    kept = set_rows(dup(dy), zeros(src.shape, F32), ids)
    first = dy.shape[: len(ids.shape)]
    rows = reshape(dy, (*first, dy.n_elements // prod(first)))
    return kept, reshape(get_rows(rows, ids), src.shape), None


def _set_rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases: list[tuple[Shape, Shape]] = [((1, 1), (1,)), ((6, 33), (3,)), ((4, 2, 8), (2,))]
    cases += [((3, 5, 4), (3, 2)), ((4, 2, 6, 3), (2, 1, 4)), ((2, 3, 7), (2, 1))]
    for shape, n_ids in cases:
        n_batch = len(n_ids) - 1
        every = np.tile(np.arange(shape[n_batch], dtype=np.int32), (*n_ids[:-1], 1))
        ids = rng.permuted(every, axis=-1)[..., : n_ids[-1]]
        src = rng.standard_normal((*shape[:n_batch], n_ids[-1], *shape[n_batch + 1 :]))
        dst = rng.standard_normal(shape)
        yield Sample((dst, src, ids))
        yield Sample((leaf(dst.astype(np.float16)), src, ids))
    for kind in ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K"):
        row = max(DTYPES[kind].block, 64)
        src, numbers = rng.standard_normal((2, 2, 3, row)), np.tile(np.arange(5), (1, 2, 1))
        drawn = rng.permuted(numbers, axis=-1)
        yield Sample((zeros((2, 2, 5, row), DTYPES[kind]), src, drawn[..., :3].astype(np.int32)))


SET_ROWS = op(
    name="set_rows",
    ggml=GGMLOp.SET_ROWS,
    spec=_set_rows_spec,
    ref=_set_rows_ref,
    grad=_set_rows_grad,
    samples=_set_rows_samples,
    memory=Memory.ALIAS,
    shares=True,
)
cpu_kernel(SET_ROWS, _set_rows_run, scratch=_set_rows_scratch)
