"""Rows read from a table by their numbers, and rows written into one: see ops/layout/rows.py
and set_rows.py.

Ids are data. A kernel leaves out those that are no row, and reports them (`Faults`).
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code.blocks import first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits
from pyggml.backends.cuda.ops.layout.copies import as_it_is, bf16_to_float, fill
from pyggml.backends.cuda.ops.products import adding
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import (
    THREADS,
    in_turn,
    per_element,
    per_result,
    per_row,
    per_rows,
)
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.cuda.weights.readers import weight_of
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F16, F32, Q8_0, DType
from pyggml.graph.tensor import Shape, Tensor


class Batches(NamedTuple):
    """The batches of a table, and those of its ids, which are repeated where they are fewer."""

    inner: int  # batches along the inner one of two axes
    ids_outer: int
    ids_inner: int

    @classmethod
    def of(cls, batch: Shape, ids: Shape) -> Batches:
        sizes, of_ids = ((*(1,) * (2 - len(batch)), *s) for s in (batch, ids[: len(batch)]))
        return cls(sizes[1], of_ids[0], of_ids[1])


@device
def _batch_of_ids(b, inner, ids_outer, ids_inner):
    return (b // inner % ids_outer) * ids_inner + b % inner % ids_inner


# -- get_rows -----------------------------------------------------------------------------------


def _element_reader(dtype: DType) -> Any:
    convert = bf16_to_float if dtype is BF16 else as_it_is

    @device
    def read(table, row, j, n):
        return convert(table[row * n + j])

    return read


def _weight_reader(dtype: DType) -> Any:
    weight, block, n_bytes = weight_of(dtype.name), dtype.block, dtype.block_bytes

    @device
    def read(table, row, j, n):
        return weight(table, (row * (n // block) + j // block) * n_bytes, j % block)

    return read


@cache
def _gather(dtype: DType) -> Any:
    read = _weight_reader(dtype) if dtype.quantised else _element_reader(dtype)

    @kernel
    def gather(out, table, ids, n, n_ids, n_rows, batches, cell, fault):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            row = i // n
            b = row // n_ids
            of_ids = _batch_of_ids(b, batches[0], batches[1], batches[2])
            entry = ids[of_ids * n_ids + row % n_ids]
            if 0 <= entry < n_rows:
                out[i] = read(table, b * n_rows + entry, i % n, n)
            else:
                cuda.atomic.max(cell, 0, fault)

    return gather


def no_such_row(site: CudaSite, op: str, n_rows: int) -> int:
    """The number of the fault of an id that is none of so many rows."""
    return site.faults.number(f"{op}: an id is no row of a table of {n_rows} rows")


def _get_rows(site: CudaSite) -> Call:
    table, ids = site.node.src
    *batch, n_rows, n = table.shape
    batches = Batches.of(tuple(batch), ids.shape)
    n_ids = prod(ids.shape[len(batch) :])
    fault = no_such_row(site, "get_rows", n_rows)
    return per_result(
        _gather(table.dtype), site, n, n_ids, n_rows, tuple(batches), site.faults.cell, fault,
    )  # fmt: skip


# -- get_rows_back ------------------------------------------------------------------------------


@kernel
def _add_rows(table, dy, ids, n, n_ids, n_rows, batches, cell, fault):
    """A block takes a row of dy and, if no earlier one has its id, adds it to the table's row, and
    all later ones of that id in their order: each run gives the same."""
    same = cuda.shared.array(THREADS, np.int32)
    for row in range(cuda.blockIdx.x, dy.size // n, cuda.gridDim.x):
        b, k, is_later = row // n_ids, row % n_ids, np.int32(0)
        first = _batch_of_ids(b, batches[0], batches[1], batches[2]) * n_ids
        entry = ids[first + k]
        for other in range(cuda.threadIdx.x, k, cuda.blockDim.x):
            is_later |= np.int32(ids[first + other] == entry)
        if cuda.syncthreads_or(is_later):
            continue
        if not 0 <= entry < n_rows:
            cuda.atomic.max(cell, 0, fault)
            continue
        to = (b * n_rows + entry) * n
        for start in range(k, n_ids, cuda.blockDim.x):
            other = start + cuda.threadIdx.x
            is_same = np.int32(other < n_ids and ids[first + other] == entry)
            same[cuda.threadIdx.x] = is_same
            if cuda.syncthreads_or(is_same):
                for i in range(min(cuda.blockDim.x, n_ids - start)):
                    if same[i]:
                        of = (b * n_ids + start + i) * n
                        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
                            table[to + j] += dy[of + j]
            cuda.syncthreads()


def _added_rows(site: CudaSite) -> Call:
    """The call that adds the rows of dy to those of the result."""
    dy, ids = site.node.src[-2:]
    batch, n_rows, n = site.node.params["batch"], site.node.params["n_rows"], dy.shape[-1]
    n_ids = prod(ids.shape[len(batch) :])
    fault = no_such_row(site, "get_rows_back", n_rows)
    return per_row(
        _add_rows, prod(batch) * n_ids, n, site.stream, site.out, *site.src[-2:], n, n_ids, n_rows,
        tuple(Batches.of(batch, ids.shape)), site.faults.cell, fault,
    )  # fmt: skip


GET_ROWS_BACK_ADDED = CudaKernel(lambda site: adding(site, _added_rows(site)))


# -- set_rows -----------------------------------------------------------------------------------


@kernel
def _check(ids, n_ids, n_rows, cell, no_row, twice):
    """A block for each id: its threads compare it with those before it of the same batch."""
    for i in range(cuda.blockIdx.x, ids.size, cuda.gridDim.x):
        own = ids[i]
        if cuda.threadIdx.x == 0 and not 0 <= own < n_rows:
            cuda.atomic.max(cell, 0, no_row)
        for other in range(i - i % n_ids + cuda.threadIdx.x, i, cuda.blockDim.x):
            if ids[other] == own:
                cuda.atomic.max(cell, 0, twice)


@device
def _row_of(row, ids, n_ids, n_rows, batches):
    """The row of dst, over all batches, that a row of src goes to; −1 if there is none."""
    b = row // n_ids
    of_ids = _batch_of_ids(b, batches[0], batches[1], batches[2])
    entry = ids[of_ids * n_ids + row % n_ids]
    return b * n_rows + entry if 0 <= entry < n_rows else -1


@cache
def _putter(in_bf16: bool) -> Any:
    convert = bf16_bits if in_bf16 else as_it_is

    @kernel
    def put(dst, src, ids, n, n_ids, n_rows, batches, n_src):
        for row in range(first_row(), n_src, rows_apart()):
            to = _row_of(row, ids, n_ids, n_rows, batches)
            if to >= 0:
                for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
                    dst[to * n + j] = convert(src[row * n + j])

    return put


@kernel
def _put_q8_0(dst, scales, src, ids, n, n_ids, n_rows, batches):
    """A thread packs a block of 32, as ggml's reference does: d = max |x| / 127, x / d rounded.

    `scales` is dst as float16: a block has 17 of them, the first is its d.
    """
    for i in range(cuda.grid(1), src.size // 32, cuda.gridsize(1)):
        to = _row_of(i * 32 // n, ids, n_ids, n_rows, batches)
        if to >= 0:
            most = ZERO
            for j in range(32):
                most = max(most, abs(src[i * 32 + j]))
            d = most / np.float32(127)
            inverse = np.float32(1) / d if d > ZERO else ZERO
            at = to * (n // 32) + i % (n // 32)
            scales[at * 17] = d
            for j in range(32):
                x = src[i * 32 + j] * inverse
                q = np.int32(abs(x) + np.float32(0.5))
                dst[at * 34 + 2 + j] = np.uint8((-q if x < ZERO else q) & 255)


class _Bits(NamedTuple):
    """A type whose blocks of 32 have a scale, with a minimum perhaps, and numbers of n_bits."""

    n_bits: int
    has_minimum: bool

    @property
    def head(self) -> int:
        """Bytes before the low halves of the numbers."""
        return 2 * (1 + self.has_minimum) + 4 * (self.n_bits - 4)


_BITS = {
    "Q4_0": _Bits(4, False), "Q4_1": _Bits(4, True), "Q5_0": _Bits(5, False), "Q5_1": _Bits(5, True)
}  # fmt: skip


@cache
def _packer(kind: _Bits) -> Any:
    """As _put_q8_0. With a minimum x = q·d + m, d = (max − min) / most; else
    x = (q − half)·d, where d makes the number that is furthest from 0 the lowest."""
    has_minimum, head, has_fifth = kind.has_minimum, kind.head, kind.n_bits > 4
    n_bytes, most, half = head + 16, np.int32((1 << kind.n_bits) - 1), 1 << (kind.n_bits - 1)
    lowest, of_steps = np.float32(-half), np.float32(most)
    up = np.float32(0.5 if has_minimum else half + 0.5)

    @device
    def bounds(src, at):
        """(d, what is taken off each number before)."""
        low, high, far = src[at], src[at], ZERO
        for j in range(32):
            x = src[at + j]
            low, high = min(low, x), max(high, x)
            if abs(x) > abs(far):
                far = x
        return ((high - low) / of_steps, low) if has_minimum else (far / lowest, ZERO)

    @kernel
    def put(dst, scales, src, ids, n, n_ids, n_rows, batches):
        for i in range(cuda.grid(1), src.size // 32, cuda.gridsize(1)):
            to = _row_of(i * 32 // n, ids, n_ids, n_rows, batches)
            if to < 0:
                continue
            d, low = bounds(src, i * 32)
            inverse = np.float32(1) / d if d != ZERO else ZERO
            at = (to * (n // 32) + i % (n // 32)) * n_bytes
            scales[at // 2] = d
            if has_minimum:
                scales[at // 2 + 1] = low
            fifth = np.uint32(0)
            for j in range(16):
                x, y = (src[i * 32 + j] - low) * inverse, (src[i * 32 + 16 + j] - low) * inverse
                p, q = min(np.int32(x + up), most), min(np.int32(y + up), most)
                dst[at + head + j] = np.uint8(p & 15 | (q & 15) << 4)
                fifth |= np.uint32(p >> 4 & 1) << np.uint32(j)
                fifth |= np.uint32(q >> 4 & 1) << np.uint32(j + 16)
            if has_fifth:
                for j in range(4):
                    dst[at + head - 4 + j] = np.uint8(fifth >> np.uint32(8 * j) & np.uint32(255))

    return put


def faults_of_rows(site: CudaSite, n_rows: int) -> tuple[int, int]:
    """The numbers of the faults of ids to write to: that one is no row, and that it comes twice."""
    twice = site.faults.number("set_rows: an id is named twice")
    return no_such_row(site, "set_rows", n_rows), twice


def _set_rows(site: CudaSite) -> Call:
    dst, _, ids = site.node.src
    batch, n_ids = dst.shape[: len(ids.shape) - 1], ids.shape[-1]
    n_rows, n = dst.shape[len(batch)], prod(dst.shape[len(batch) + 1 :])
    no_row, twice = faults_of_rows(site, n_rows)
    _, src, numbers = site.src
    where = (src, numbers, n, n_ids, n_rows, tuple(Batches.of(batch, ids.shape)))
    if dst.dtype.quantised:
        pack = _put_q8_0 if dst.dtype is Q8_0 else _packer(_BITS[dst.dtype.name])
        scales = site.out.view(np.float16)
        put = per_element(pack, src.size // 32, site.stream, site.out, scales, *where)
    else:
        run, n_src = _putter(dst.dtype is BF16), src.size // max(n, 1)
        put = per_rows(run, n_src, n, site.stream, site.out, *where, n_src)
    check = per_row(
        _check, ids.n_elements, n_ids, site.stream, numbers, n_ids, n_rows, site.faults.cell,
        no_row, twice,
    )  # fmt: skip
    return in_turn(check, put)


def _unwritten(node: Tensor) -> str | None:
    kind = node.src[0].dtype
    if kind in (F32, F16, BF16, Q8_0) or kind.name in _BITS:
        return None
    return f"rows of {kind} are packed by none of its kernels"


declare("get_rows", _get_rows)
declare("get_rows_back", lambda site: in_turn(fill(site, ZERO), _added_rows(site)))
declare("set_rows", _set_rows, _unwritten)
