"""Products of few rows of A in one launch: of several matrices, after a norm, with what is added.

    y = A · Wᵀ + b        y = silu(A · gateᵀ) · (A · upᵀ)        A may be rms_norm(a) · w

Each part, a result of its own, has some of the blocks of the launch. All round A by themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.fours import vectorizable
from pyggml.backends.cuda.code.jit import kernel, most_shared
from pyggml.backends.cuda.gemm import digits
from pyggml.backends.cuda.gemm.packed_dots import (
    CHUNK,
    Cut,
    DotShape,
    SharedLayout,
    adder,
    adds_reader,
    beginner,
    finisher,
    rows_of,
)
from pyggml.backends.cuda.gemm.problem import CudaOperands, CudaProblem, CudaProductPath
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import begins_early, follow, lead, least_shared
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import HAS_PTX
from pyggml.backends.cuda.weights.packed import (
    MOST_GROUPS,
    PackedUnit,
    compile_closure,
    grid_words_of,
    has_minima_of_halves,
    unit_of,
)
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DType
from pyggml.quants import QUANTS
from pyggml.quants.layout import GROUP
from pyggml.sizes import round_up

MOST_ROWS = 4  # of A
BLOCKS = 132  # one for each multiprocessor of a large card
MOST_WARPS, _FEWEST_WARPS = 16, 8  # of a block; the fewest round A at once
_WARPS_BESIDE = 14  # of each of two blocks that have 72 registers a thread, which is enough
_RESERVED = 2 << 10  # bytes of shared memory that two blocks have for themselves
_STEP = 128  # in which a multiprocessor gives them
_SHORT = 8  # units: a row of as many is multiplied while the next launch's weights come
_FEW_BITS, _FEWEST_BITS = 8, 5  # a weight: see `has_few_bits` and `_with_room`
_SHARED = 200 << 10  # bytes that a block takes at most, of a card that has them


@dataclass(frozen=True, slots=True)
class FewRowsProduct:
    """A result (rows, n): A · wᵀ, with `added` to it; or with `up` a gated product."""

    out: Any
    w: Any
    dtype: DType
    n: int
    added: Any = None
    up: Any = None


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """A is rms_norm(a) · weights; it is written to `out` if others read it."""

    weights: Any
    eps: np.float32
    out: Any
    is_read: bool


def serves(dtype: DType, rows: int, k: int) -> bool:
    """Whether there are such products with W of this type."""
    if not HAS_PTX or not dtype.quantised or rows > MOST_ROWS:
        return False
    unit = unit_of(dtype.name, k)
    return unit is not None and _least_bytes(unit, rows, k) <= shared_bytes()


@cache
def shared_bytes() -> int:
    """Alike for all cards of a process, which have one compute capability (opening.py)."""
    return min(_SHARED, most_shared())


def _least_bytes(unit: PackedUnit, rows: int, k: int) -> int:
    """Of shared memory: A, the grids of W's type, the sums of a slab of a gated product, a chunk of
    any type."""
    fixed = _bytes_of_a(unit, rows, k, has_minima_of_halves(unit)) + _grid_bytes(unit)
    return fixed + 2 * _slab_bytes(unit, rows, k) + _largest_chunk()


def _grid_bytes(unit: PackedUnit) -> int:
    return grid_words_of(unit).nbytes


def _bytes_of_a(unit: PackedUnit, rows: int, k: int, has_halves: bool) -> int:
    """With its squares, and what is lost where sums and chunks begin."""
    layout = digits.layout_of(rows, k, unit.n_groups, has_halves)
    return layout.squares + 4 * rows * MOST_WARPS + 32


def _slab_bytes(unit: PackedUnit, rows: int, k: int) -> int:
    """Bytes of the sums of a slab."""
    units, of_slab = _slab(unit, k)
    return 4 * rows * units * of_slab


@cache
def _largest_chunk() -> int:
    names = (name for name, quant in QUANTS.items() if quant.dtype.quantised)
    units = (unit_of(name, GROUP * MOST_GROUPS) for name in names)
    return max(_chunk_bytes(unit) for unit in units if unit is not None) + _BEYOND


def _chunk_bytes(unit: PackedUnit) -> int:
    return CHUNK * unit.n_bytes


_BEYOND = 16  # bytes: a load of the last chunk's last word may go beyond


class LaunchPlan(NamedTuple):
    """How blocks share out a launch's parts: of each part what it is compiled for, its blocks and
    its Cut; and of a block its shared memory, its warps, and bytes that the launch asks for."""

    kinds: tuple[DotShape, ...]
    blocks: list[int]
    cuts: list[Cut]
    layout: SharedLayout
    n_warps: int
    n_bytes: int


def plan(
    parts: Sequence[FewRowsProduct], shares: Sequence[int], rows: int, k: int, vectorized: bool
) -> LaunchPlan:
    """shares: blocks that each part gets if their sums fit; vectorized: see DotShape"""
    units = [_unit(part, k) for part in parts]
    grids, has_halves = max(map(_grid_bytes, units)), any(map(has_minima_of_halves, units))
    free = shared_bytes() - _bytes_of_a(units[0], rows, k, has_halves) - grids
    both = list(zip(parts, units, strict=True))
    kinds = tuple(_kind(part, unit, rows, k, vectorized, has_halves) for part, unit in both)
    blocks = [_fitting(n, *one, rows, k, free) for n, one in zip(shares, both, strict=True)]
    cuts = [_cut(*one, k, n) for n, one in zip(blocks, both, strict=True)]
    layout, n_warps, n_bytes = _shared_layout(kinds, cuts, k)
    return LaunchPlan(kinds, blocks, cuts, layout, n_warps, max(n_bytes, least_shared()))


def has_few_bits(dtype: DType) -> bool:
    """Whether products with W of this type leave the memory idle while launches follow each other,
    so that the next ones begin as early as they can. With Q8_0 it is busy, and what begins early
    takes its bandwidth from the launch that is waited for."""
    return dtype.quantised and 8 * dtype.block_bytes < _FEW_BITS * dtype.block


def _bits(kinds: Sequence[DotShape]) -> float:
    return max(8 * kind.unit.n_bytes / (GROUP * kind.unit.n_groups) for kind in kinds)


def _leads(kinds: Sequence[DotShape], has_norm: bool) -> bool:
    """Whether a launch lets the next one begin before it waits: of few bits and short rows, such as
    attention's output."""
    of_a = kinds[0]
    is_plain = len(kinds) == of_a.rows == 1 and not of_a.is_gated and not has_norm
    return is_plain and of_a.units <= _SHORT and _bits(kinds) < _FEW_BITS


def _with_room(p: LaunchPlan, has_norm: bool) -> LaunchPlan:
    """The same where a block of the next launch finds room beside each block of one that leads.

    Two blocks of that would share some multiprocessors, as attention has blocks on others: so a
    block takes more than half of one. A block with more bits a weight does not, as gate and up's
    would then have no room. Theirs has its sums over A's digits, if it needs that to fit."""
    if _bits(p.kinds) >= _FEW_BITS:
        return p
    if _leads(p.kinds, has_norm) and _bits(p.kinds) < _FEWEST_BITS:
        return p._replace(n_bytes=max(p.n_bytes, _bytes_alone()))
    return _over_a(p) if p.n_bytes > _beside_one_alone() else p


def _bytes_alone() -> int:
    """Of shared memory: more than half of a multiprocessor's, of which `least_shared` is a third;
    0 where that is."""
    return least_shared() and 3 * least_shared() // 2 - _RESERVED // 2 + _STEP


def _beside_one_alone() -> int:
    """Bytes of a multiprocessor's shared memory that a block that stands alone leaves to one of the
    next launch."""
    return 3 * least_shared() - _RESERVED - _bytes_alone()


def _over_a(p: LaunchPlan) -> LaunchPlan:
    """The same with sums over A's digits, if it then fits beside a block that stands alone."""
    of_a, layout = p.kinds[0], p.layout
    sums, chunks = p.cuts[0].most << of_a.is_gated, layout.sums
    n_bytes = p.n_bytes - (layout.chunks - chunks)
    fits = 4 * sums <= layout.a.digits and sums // CHUNK <= 2 * p.n_warps
    if len(p.kinds) > 1 or of_a.rows > 1 or not fits or n_bytes > _beside_one_alone():
        return p
    kinds, layout = (of_a._replace(over_a=True),), layout._replace(sums=0, chunks=chunks)
    return p._replace(kinds=kinds, layout=layout, n_bytes=n_bytes)


def products(
    parts: Sequence[FewRowsProduct],
    a: Any,
    rows: int,
    k: int,
    stream: Any,
    norm: FusedNorm | None = None,
) -> Call:
    """The launch. `serves` holds for all parts."""
    of_norm, vectorized = norm_argument(a, k, norm)
    shares = share_out([part.w.size for part in parts], BLOCKS)
    p = _with_room(plan(parts, shares, rows, k, vectorized), norm is not None)
    ends = tuple(np.int64(n) for n in np.cumsum(p.blocks))
    run = _kernel(p.kinds, norm is not None, _has_room_beside(p))
    return launch(
        run, int(ends[-1]), 32 * p.n_warps, stream,
        tuple(map(part_argument, parts, p.cuts)), ends, a, k, p.layout, of_norm,
        shared_bytes=p.n_bytes,
    )  # fmt: skip


def _kind(
    part: FewRowsProduct, unit: PackedUnit, rows: int, k: int, vectorized: bool, has_halves: bool
) -> DotShape:
    units, slab = _slab(unit, k)
    is_gated, is_whole = part.up is not None, part.n % slab == 0
    return DotShape(unit, units, rows, is_gated, vectorized, is_whole, has_halves)


def _unit(part: FewRowsProduct, k: int) -> PackedUnit:
    unit = unit_of(part.dtype.name, k)
    assert unit is not None
    return unit


def share_out(sizes: Sequence[int], n: int) -> list[int]:
    """How many of n blocks parts of so many bytes have."""
    shares = [max(1, n * size // sum(sizes)) for size in sizes]
    for _ in range(n - sum(shares)):
        neediest = max(range(len(sizes)), key=lambda i: sizes[i] / shares[i])
        shares[neediest] += 1
    return shares


def _slab(unit: PackedUnit, k: int) -> tuple[int, int]:
    """Units of a row, and rows of a slab."""
    row = k // (GROUP * unit.n_groups)
    return row, CHUNK // gcd(row, CHUNK)


def _n_slabs(part: FewRowsProduct, unit: PackedUnit, k: int) -> int:
    return -(-part.n // _slab(unit, k)[1])


def _fitting(
    n_blocks: int, part: FewRowsProduct, unit: PackedUnit, rows: int, k: int, free: int
) -> int:
    """n_blocks, or more where a block's sums would not fit in the bytes that A and the grids leave
    free, beside the chunks of the fewest warps, or in half of them if that is less. Each block has
    a slab."""
    chunk = _largest_chunk()
    free -= max(chunk, min(_FEWEST_WARPS * chunk, free // 2))
    most = max(1, free // ((1 + (part.up is not None)) * _slab_bytes(unit, rows, k)))
    n_slabs = _n_slabs(part, unit, k)
    return min(n_slabs, max(n_blocks, -(-n_slabs // most)))


def _cut(part: FewRowsProduct, unit: PackedUnit, k: int, n_blocks: int) -> Cut:
    row, slab = _slab(unit, k)
    slabs, more = divmod(_n_slabs(part, unit, k), n_blocks)
    return Cut(slab, slabs, more, (slabs + (more > 0)) * slab * row)


def _shared_layout(
    kinds: Sequence[DotShape], cuts: Sequence[Cut], k: int
) -> tuple[SharedLayout, int, int]:
    """Of a block: its shared memory, its warps, and its bytes. As many warps as chunks, or as many
    as have a chunk in each of a few rounds, if the memory is enough."""
    rows, groups = kinds[0].rows, kinds[0].unit.n_groups  # alike in all, as k is
    a = digits.layout_of(rows, k, groups, kinds[0].has_halves)
    matrices = [1 + kind.is_gated for kind in kinds]
    both = list(zip(cuts, matrices, strict=True))
    grids = round_up(a.squares + 4 * rows * MOST_WARPS, 16)
    sums = grids + max(_grid_bytes(kind.unit) for kind in kinds)
    chunks = round_up(sums + max(4 * rows * cut.most * n for cut, n in both), 16)
    chunk = max(_chunk_bytes(kind.unit) for kind in kinds)
    tasks = max(cut.most // CHUNK * n for cut, n in both)
    most = max(1, min(MOST_WARPS, (shared_bytes() - chunks - _BEYOND) // chunk))
    n_chunks = -(-tasks // -(-tasks // most))
    n_warps = n_chunks if tasks > n_chunks else max(n_chunks, _FEWEST_WARPS)
    n_bytes = chunks + n_chunks * chunk + _BEYOND
    # A second chunk of each warp, if that leaves a block of the next launch its third.
    second = n_chunks * chunk
    if tasks == n_chunks or n_bytes + second > min(shared_bytes(), 2 * least_shared() - _RESERVED):
        second = 0
    return SharedLayout(a, grids, sums, chunks, chunk, second), n_warps, n_bytes + second


def norm_argument(a: Any, k: int, norm: FusedNorm | None) -> tuple[tuple[Any, ...], bool]:
    """(weights, eps, out, is_read) of a norm or in place of none, and whether its weights and A lie
    as load_four wants them."""
    weights, out = (a, a) if norm is None else (norm.weights, norm.out)
    eps, is_read = (np.float32(0), False) if norm is None else (norm.eps, norm.is_read)
    return (weights, eps, out, is_read), k % 4 == 0 and vectorizable(a, weights)


def part_argument(part: FewRowsProduct, cut: Any) -> tuple[Any, ...]:
    """As packed_dots.py has it: (out, added, w, up, n, cut, adds)."""
    added, w = part.out if part.added is None else part.added, part.w.view(np.uint8)
    up = w if part.up is None else part.up.view(np.uint8)
    return part.out, added, w, up, part.n, cut, part.added is not None


_SOURCE = """
    first, n_rows = rows_of(part[5], number)
    BEGIN
    arguments = part[0], part[1], part[4], part[6], a, k, layout, norm
    free = np.uint64((layout.a.digits >> 2) - 1)  # of the room after the last unit
    floats[free] = as_float(bits_of_all(arguments))  # as early.py says
    follow()
    round_a(memory, floats, a, k, layout.a, norm)
    read_added(held, part, first, min(n_rows, part[4] - first))
    cuda.syncthreads()
    ADD
    cuda.syncthreads()
    finish(floats, held, part, a, k, layout, norm, first, min(n_rows, part[4] - first))"""


def _source(kinds: Sequence[DotShape]) -> str:
    """The source of a launch's kernel: each block computes some of one part. All parts share its
    code, but for what depends on the type of W: the less of it, the shorter such a launch."""
    n_kinds = len(set(kinds))
    lines = [
        "def multiply(parts, ends, a, k, layout, norm):",
        "    memory = cuda.shared.array(0, np.uint32)",
        "    floats = cuda.shared.array(0, np.float32)",
        "    held = cuda.local.array(n_rows_of_a, np.float32)",
        *part_lines(kinds, "np.int64(cuda.blockIdx.x)"),
    ]
    more = "layout, first, n_rows)"
    begin = by_kind("begin{}(memory, part, " + more, n_kinds)
    add = by_kind("add{}(memory, floats, part, " + more, n_kinds)
    return "\n".join(lines) + _SOURCE.replace("BEGIN", begin).replace("ADD", add)


def part_lines(kinds: Sequence[Any], block: str) -> Iterator[str]:
    """Lines that find a block's part of a launch, its number there and the kind of the part."""
    different = list(dict.fromkeys(kinds))
    yield f"    part, number, kind = parts[0], {block}, 0"
    for i, kind in enumerate(kinds[1:]):
        yield f"    if {block} >= ends[{i}]:"
        yield f"        part, number = parts[{i + 1}], {block} - ends[{i}]"
        yield f"        kind = {different.index(kind)}"


def by_kind(line: str, n_kinds: int, room: str = "    ") -> str:
    """A line that names the function of a block's kind; room: before all lines but the first."""
    if n_kinds == 1:
        return line.format(0)
    return f"\n{room}".join(
        f"{'el' if i else ''}if kind == {i}:\n{room}    {line.format(i)}" for i in range(n_kinds)
    )


def _has_room_beside(p: LaunchPlan) -> bool:
    """Whether a block leaves the next launch's, of any kind, half of a multiprocessor's registers:
    with one row of A and few bits a weight."""
    return p.kinds[0].rows == 1 and _bits(p.kinds) < _FEW_BITS and p.n_warps <= _WARPS_BESIDE


@cache
def _kernel(kinds: tuple[DotShape, ...], has_norm: bool, has_room_beside: bool) -> Any:
    # In rows of A and units of a row all are alike, as k is; a gated product is alone.
    of_a, leads = kinds[0], _leads(kinds, has_norm)
    names: dict[str, Any] = {
        "cuda": cuda, "np": np, "n_rows_of_a": of_a.rows, "rows_of": rows_of,
        "follow": lead if leads else follow,
        "as_float": ptx.as_float, "bits_of_all": ptx.bits_of_all,
        "read_added": adds_reader(of_a.rows), "finish": finisher(of_a, has_norm),
        "round_a": digits.rounder(
            of_a.rows, of_a.unit.n_groups, has_norm, of_a.vectorized, of_a.has_halves
        ),
    }  # fmt: skip
    for i, kind in enumerate(dict.fromkeys(kinds)):
        names |= {f"begin{i}": beginner(kind), f"add{i}": adder(kind)}
    source = compile_closure(_source(kinds), "multiply", names)
    most, least = (_WARPS_BESIDE, 2) if has_room_beside else (MOST_WARPS, 1)
    run = kernel(source, 32 * most, shared_bytes(), least_blocks=least)
    return begins_early(run, lambda of: [w for part in of[0] for w in part[2:4]], leads)


# -- the path -----------------------------------------------------------------------------------


def packed_path(
    name: str, serves: Callable[[CudaProblem], bool], products: Callable[..., Call]
) -> CudaProductPath:
    """The path of a product with packed weights by a launch of one part, where it serves."""

    def takes(p: CudaProblem) -> bool:
        lies_well = p.a_is_whole and p.b_in_rows and (p.n == 1 or p.b.row == p.k)
        return p.rounds and lies_well and p.b_aligned and serves(p)

    def bind(p: CudaProblem, o: CudaOperands) -> Call:
        part = FewRowsProduct(o.c, o.b, p.b.dtype, p.n, added=o.c if o.accumulate else None)
        return products([part], o.a, p.m, p.k, o.stream)

    return CudaProductPath(name=name, takes=takes, bind=bind, scratch=lambda p: 0)


FEW_ROWS = packed_path("few rows", lambda p: serves(p.b.dtype, p.m, p.k), products)
