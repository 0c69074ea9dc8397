"""Wide rows: a float32 matrix rounded to bfloat16, and beside it its product with thin factors.

Both need every number once, so one kernel reads the matrix once. The matrix may be a formula of
others (operands.py), which then never exists in float32. A block takes 16 rows, and its warps share
their columns; where rows are few, so do several blocks. These are a cluster and send each other
what they have found; on cards without clusters the last of them to end adds it up. Columns are
multiplied in another order than they lie in, the same for both factors: so a lane's eight numbers
are neighbours. Where rows are many, a block takes two times 16 of them, and reads the thin factors
once for both. Rows begin at whole cache lines: cuBLAS reads them faster.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import cluster_ptx, ptx
from pyggml.backends.cuda.code.blocks import is_last
from pyggml.backends.cuda.code.cluster_ptx import MOST_BLOCKS, has_clusters
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.fours import load_four, vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.lora.operands import (
    Types,
    formula_of,
    in_words,
    loader_of,
    three,
    types_of,
)
from pyggml.backends.cuda.ops.lora.thin_tiles import (
    ROWS,
    TILE_COLUMNS,
    adder,
    clear_tiles,
    hold,
    put_held,
    put_tiles,
    tiles_of,
)
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, launch
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

MANY_ROWS, _FEW_COLUMNS = 2048, 64  # from and to which a block takes two times so many
FEWEST_COLUMNS = 24  # to which three blocks have registers enough
FEW_ROWS = 512  # to which clusters take them
TOGETHER = 3  # blocks of clusters on a multiprocessor: with two, 32 clusters have no room at once
MOST_COLUMNS = 192  # further ones: sums of a block in shared memory
COLUMNS = 32  # of x, eight to a lane
_STEPS = 2  # of 32 numbers, whose loads are under way at the same time
_CARD = 132  # multiprocessors of a large card, which is filled once
_AT_ONCE = 8  # parts of sums, whose loads are under way at the same time
_SHARED = 48 << 10  # bytes of a block
_CACHE_LINE = 64  # numbers of bfloat16


def columns(rank: int) -> int:
    """Columns of a thin factor, which are zeros from `rank` on."""
    return round_up(rank, TILE_COLUMNS)


def width(n_columns: int) -> int:
    """Numbers from one wide row to the next. What lies after the columns is not written."""
    return round_up(n_columns, _CACHE_LINE)


def places_beside(ks: Sequence[int], ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where in a wide row each of several matrices begins, and its further columns, which come
    behind all of them: so what is large begins at whole cache lines."""
    ends = [*accumulate([0, *ks, *map(columns, ranks)])]
    return ends[: len(ks)], ends[len(ks) : -1]


@device
def total_tiles(products, parts, sums, n_tiles, groups, n_warps, first, m):
    """products (blocks that share rows, m, n) = the sums of all warps; parts (n_warps, 16·groups·n)
    is in shared memory."""
    n = n_tiles * TILE_COLUMNS
    put_tiles(parts, sums, n_tiles, groups, 0, n)
    cuda.syncthreads()
    for e in range(cuda.threadIdx.x, ROWS * groups * n, cuda.blockDim.x):
        total = ZERO
        for other in range(n_warps):
            total += parts[other, e]
        if first + e // n < m:
            products[cuda.blockIdx.x * m * n + first * n + e] = total


@device
def add_up(out, copy, has_copy, products, groups, first, m, n, further, step):
    """The n columns from `further` on of 16 · groups rows of out, from the products of all blocks
    that share the rows; `copy` (m, n) gets them too, if there is one."""
    for e in range(cuda.threadIdx.x, ROWS * groups * n // 4, cuda.blockDim.x):
        row, column = first + 4 * e // n, 4 * e % n
        if row < m:
            at, a, b, c, d = row * n + column, ZERO, ZERO, ZERO, ZERO
            for first_part in range(0, cuda.gridDim.x, _AT_ONCE):
                for i in range(_AT_ONCE):  # without branches, so that all loads come first
                    part, is_part = first_part + i, first_part + i < cuda.gridDim.x
                    more = load_four(products, (part if is_part else 0) * m * n + at)
                    a, b = a + (more[0] if is_part else ZERO), b + (more[1] if is_part else ZERO)
                    c, d = c + (more[2] if is_part else ZERO), d + (more[3] if is_part else ZERO)
            ptx.put_four_bf16(out, row * step + further + column, a, b, c, d)
            if has_copy:
                ptx.put_four_bf16(copy, at, a, b, c, d)


class BlockForm(NamedTuple):
    """A block: groups of 16 rows, and warps that share their columns; as many blocks as a
    multiprocessor is to have room for, 1 where sums take most of the registers; how many steps a
    warp takes at once; and whether blocks that share rows are a cluster."""

    groups: int
    n_warps: int
    together: int
    steps: int = _STEPS
    in_cluster: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """Threads, and blocks of them that a multiprocessor has room for; 0 for any number."""
        return (32 * self.n_warps, self.together) if self.together > 1 else (0, 1)

    def n_blocks(self, m: int) -> int:
        """Those that m rows have, but for blocks that share the columns."""
        return -(-m // (ROWS * self.groups))

    def n_parts(self, m: int, k: int) -> int:
        """Blocks that share the columns of the same rows."""
        if self.in_cluster:
            return MOST_BLOCKS
        most = -(-k // (COLUMNS * self.steps * self.n_warps))
        return max(1, min(most, _CARD * max(2, self.together) // self.n_blocks(m)))

    def scratch(self, m: int, k: int, n: int) -> int:
        """Bytes of the products of all blocks, with n columns."""
        return 0 if self.in_cluster else F32.block_bytes * self.n_parts(m, k) * m * n


def form_of(m: int, k: int, n: int, steps: int = _STEPS) -> BlockForm:
    """For m rows of k columns that get n further ones. steps: where there are no clusters"""
    warps = n_warps(F32.block_bytes * ROWS * n)
    if m <= FEW_ROWS and n <= FEWEST_COLUMNS and ptx.TENSOR_CORES and has_clusters():
        steps = min(_STEPS, -(-k // (COLUMNS * warps * MOST_BLOCKS)))
        return BlockForm(1, warps, TOGETHER, steps, in_cluster=True)
    groups = 2 if m >= MANY_ROWS and n <= _FEW_COLUMNS else 1
    together = 2 if groups > 1 else 3 if n <= FEWEST_COLUMNS else 1
    return BlockForm(groups, n_warps(F32.block_bytes * ROWS * groups * n), together, steps)


def n_warps(n_bytes: int) -> int:
    """Warps of a block, whose sums of so many bytes each, and a ticket, have room in its shared
    memory."""
    return next(warps for warps in (8, 4, 3) if n_bytes * warps < _SHARED)


@cache
def _putter(groups: int) -> Any:
    @device
    def put_rows(out, words, i, first, column, m, k, step):
        """The held words from i on, of rows `first`, `first` + 8 … of m, in columns of k."""
        for half in range(2 * groups):
            row = first + 8 * half
            if row < m and column < k:
                put_held(out, row * step + column, words, i + (half >> 1), half & 1)

    return put_rows


@device
def no_cluster():
    """What makes blocks a cluster, where they are none."""


@device
def no_barrier(barrier):
    """What prepares a barrier, where blocks send each other nothing."""


@cache
def sharer(n_warps: int, n: int) -> tuple[Any, Any]:
    """(begin, share) of the blocks of a cluster that share 16 rows with n further columns."""
    share, threads = ROWS // MOST_BLOCKS * n, 32 * n_warps
    of_shares = MOST_BLOCKS, share

    @device
    def begin(barrier):
        if cuda.threadIdx.x == 0:
            cluster_ptx.expect_bytes(barrier, np.uint32(4 * MOST_BLOCKS * share))
        cluster_ptx.arrive_in_cluster()

    @device
    def share_products(parts, barrier, out, copy, has_copy, first, m, further, step):
        """The further columns of a cluster's rows of out, of which each block writes an eighth; a
        copy of them. parts: of this block's warps; all its threads have come here, and awaited the
        cluster."""
        of_blocks = cuda.shared.array(of_shares, np.float32)
        for e in range(cuda.threadIdx.x, ROWS * n, threads):
            x = ZERO
            for w in range(n_warps):
                x += parts[w, e]
            place = 4 * (cuda.blockIdx.x * share + e % share)
            cluster_ptx.send(of_blocks, place, barrier, np.uint32(e // share), x)
        at = 4 * cuda.threadIdx.x
        if at < share:
            cluster_ptx.await_bytes(barrier)
            a, b, c, d = ZERO, ZERO, ZERO, ZERO
            for block in range(MOST_BLOCKS):
                a, b = a + of_blocks[block, at], b + of_blocks[block, at + 1]
                c, d = c + of_blocks[block, at + 2], d + of_blocks[block, at + 3]
            row, column = first + ROWS // MOST_BLOCKS * cuda.blockIdx.x + at // n, at % n
            if row < m:
                ptx.put_four_bf16(out, row * step + further + column, a, b, c, d)
                if has_copy:
                    ptx.put_four_bf16(copy, row * n + column, a, b, c, d)

    return begin, share_products


@cache
def _ends(n_tiles: int, form: BlockForm) -> tuple[Any, Any, Any]:
    """(place, begin, finish) of blocks that share rows."""
    groups, n_warps, *_ = form
    n = n_tiles * TILE_COLUMNS
    of_parts = n_warps, ROWS * groups * n
    if not form.in_cluster:

        @device
        def finish(out, copy, has_copy, products, tickets, sums, barrier, first, m, further, step):
            parts = cuda.shared.array(of_parts, np.float32)
            ticket = cuda.shared.array(1, np.uint32)
            total_tiles(products, parts, sums, n_tiles, groups, n_warps, first, m)
            if is_last(ticket, tickets, cuda.blockIdx.y, cuda.gridDim.x):
                add_up(out, copy, has_copy, products, groups, first, m, n, further, step)

        return no_cluster, no_barrier, finish
    begin, share_products = sharer(n_warps, n)

    @device
    def finish_in_cluster(
        out, copy, has_copy, products, tickets, sums, barrier, first, m, further, step
    ):
        parts = cuda.shared.array(of_parts, np.float32)
        put_tiles(parts, sums, n_tiles, 1, 0, n)
        cuda.syncthreads()
        cluster_ptx.await_cluster()  # until then another block may not have begun
        share_products(parts, barrier, out, copy, has_copy, first, m, further, step)

    return cluster_ptx.clusters_of(MOST_BLOCKS), begin, finish_in_cluster


@cache
def _widener(n_tiles: int, form: BlockForm, formula: str, types: Types, in_rows: bool) -> Any:
    groups, n_warps, _, steps, _ = form
    load, add_tiles, put_rows = loader_of(formula, types), adder(in_rows, groups), _putter(groups)
    _, begin_block, finish = _ends(n_tiles, form)
    together, of_sums = COLUMNS * steps, (groups * n_tiles, 4)
    of_words, all_sums = (steps * groups, 8), groups * n_tiles

    @device
    def widen(out, copy, has_copy, products, tickets, x, y, z, tiles, m, k, further, out_step):
        barrier = cuda.shared.array(1, np.uint64)
        sums = cuda.local.array(of_sums, np.float32)
        words = cuda.local.array(of_words, np.uint32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, mine = lane >> 2, 8 * (lane & 3)
        first = np.int64(cuda.blockIdx.y) * (ROWS * groups)
        clear_tiles(sums, all_sums)
        begin_block(barrier)
        follow()
        begin, apart = cuda.blockIdx.x * n_warps + warp, cuda.gridDim.x * n_warps
        for start in range(together * begin, k, together * apart):
            for step in range(steps):  # without branches, so that all loads come first
                column = min(start + COLUMNS * step + mine, k - 8)
                is_inside = start + COLUMNS * step + mine < k
                inside = np.uint32(0xFFFFFFFF) if is_inside else np.uint32(0)
                for half in range(2 * groups):
                    row = min(first + group + 8 * half, m - 1)
                    eight = in_words(load(x, y, z, row * k + column))
                    hold(words, step * groups + (half >> 1), half & 1, eight, inside)
            for step in range(steps):
                column = min(start + COLUMNS * step + mine, k - 8)
                add_tiles(sums, words, step, tiles, n_tiles, column)
            for step in range(steps):
                column = start + COLUMNS * step + mine
                put_rows(out, words, step * groups, first + group, column, m, k, out_step)
        finish(out, copy, has_copy, products, tickets, sums, barrier, first, m, further, out_step)

    return widen


@cache
def _kernel(n_tiles: int, form: BlockForm, formula: str, types: Types, in_rows: bool) -> Any:
    widen, (threads, blocks) = _widener(n_tiles, form, formula, types, in_rows), form.bounds
    place, *_ = _ends(n_tiles, form)

    @partial(kernel, most_threads=threads, least_blocks=blocks)
    def widen_one(out, copy, has_copy, products, tickets, x, y, z, tiles, m, k, out_step):
        place()
        widen(out, copy, has_copy, products, tickets, x, y, z, tiles, m, k, k, out_step)

    return follower(widen_one)


@cache
def _kernel_of_each(n_tiles: int, form: BlockForm, in_bf16: bool) -> Any:
    widen, (threads, blocks) = _widener(n_tiles, form, "", (in_bf16,), False), form.bounds
    place, *_ = _ends(n_tiles, form)

    @partial(kernel, most_threads=threads, least_blocks=blocks)
    def widen_each(out, products, tickets, xs, tiles, m, ks, begins, furthers, out_step):
        """Several matrices, a layer of the grid for each, in their columns of out."""
        place()
        i = cuda.blockIdx.z
        x, to, further = xs[i], out[begins[i] :], furthers[i] - begins[i]
        of_it = products[i * (products.size // len(xs)) :]
        tickets_of_it = tickets[i * (tickets.size // len(xs)) :]
        widen(
            to, to, False, of_it, tickets_of_it, x, x, x, tiles[i], m, ks[i], further, out_step
        )  # fmt: skip

    return follower(widen_each)


def tickets_of(site: CudaSite, m: int, n: int = 1) -> Any:
    """For each 16 rows of n matrices, what tells the last block to end: 0 between launches."""
    return site.constant(np.zeros(n * -(-m // ROWS), np.uint32))


def _factors(node: Tensor) -> tuple[Tensor, ...]:
    """The thin factors, the last sources."""
    return node.src[-len(node.params["scales"]) :]


def _scratch_of_rows(node: Tensor, compute: Compute) -> int:
    (m, k), n = node.src[0].shape, sum(columns(a.shape[0]) for a in _factors(node))
    return form_of(m, k, n).scratch(m, k, n)


def _scratch_of_gradient(node: Tensor, compute: Compute) -> int:
    factors = _factors(node)
    m, k = node.src[0].shape[0], max(b.shape[0] for b in factors)
    ns = [columns(b.shape[1]) for b in factors]
    return sum(form_of(m, k, n).scratch(m, k, n) for n in ns)


def _bind(site: CudaSite, ranks: Sequence[int], steps: tuple[int, int], in_rows: bool) -> Call:
    node, ((m, k), n) = site.node, (site.node.src[0].shape, sum(map(columns, ranks)))
    operands = len(node.src) - len(ranks)
    kind = formula_of(node), types_of(node.src[:operands])
    copy, has_copy = (*site.saved, site.out)[0], bool(site.saved)
    form = form_of(m, k, n)
    grid = form.n_parts(m, k), form.n_blocks(m)
    tiles = tiles_of(site.src[operands:], ranks, node.params["scales"], steps)
    return launch(
        _kernel(n // TILE_COLUMNS, form, *kind, in_rows), grid, 32 * form.n_warps, site.stream,
        site.out, copy, has_copy, site.scratch.view(np.float32), tickets_of(site, m),
        *three(site.src[:operands]), tiles, m, k, node.shape[1],
    )  # fmt: skip


def _bind_rows(site: CudaSite) -> Call:
    k, factors = site.node.src[0].shape[1], _factors(site.node)
    in_rows = all(vectorizable(a) for a in site.src[-len(factors) :])
    return _bind(site, [a.shape[0] for a in factors], (k, 1), in_rows)


def _bind_gradient(site: CudaSite) -> Call:
    factors = _factors(site.node)
    if len(factors) > 1:
        return _bind_each(site)
    (b,) = factors
    return _bind(site, [b.shape[1]], (1, b.shape[1]), in_rows=False)


def _bind_each(site: CudaSite) -> Call:
    """A launch for the matrices of a type and a rank."""
    node, scales = site.node, site.node.params["scales"]
    n, m = len(scales), site.node.src[0].shape[0]
    ks, ranks = [t.shape[1] for t in node.src[:n]], [b.shape[1] for b in node.src[n:]]
    begins, furthers = places_beside(ks, ranks)
    alike: dict[tuple[bool, int], list[int]] = {}
    for i, r in enumerate(ranks):
        alike.setdefault((node.src[i].dtype is BF16, r), []).append(i)
    calls, scratch = [], site.scratch.view(np.float32)
    for (in_bf16, rank), indices in alike.items():
        form = form_of(m, max(ks), columns(rank))
        grid = form.n_parts(m, max(ks)), form.n_blocks(m), len(indices)
        taken = len(indices) * form.scratch(m, max(ks), columns(rank)) // F32.block_bytes
        tiles = tuple(tiles_of([site.src[n + i]], [rank], [scales[i]], (1, rank)) for i in indices)
        of_each = (tuple(of[i] for i in indices) for of in (ks, begins, furthers))
        calls.append(launch(
            _kernel_of_each(columns(rank) // TILE_COLUMNS, form, in_bf16),
            grid, 32 * form.n_warps, site.stream, site.out, scratch[:taken],
            tickets_of(site, m, len(indices)), tuple(site.src[i] for i in indices), tiles, m,
            *of_each, node.shape[1],
        ))  # fmt: skip
        scratch = scratch[taken:]
    return in_turn(*calls)


OF_ROWS = CudaKernel(_bind_rows, scratch=_scratch_of_rows)
OF_GRADIENT = CudaKernel(_bind_gradient, scratch=_scratch_of_gradient)
