"""Products of 5 to 32 rows of A in one launch, as of a short prompt or of several sequences: packed
weights that are unpacked in registers and multiplied by tensor cores.

    y = A · Wᵀ + b        y = silu(A · gateᵀ) · (A · upᵀ)        A may be rms_norm(a) · w

Each part, a result of its own, has some of the blocks of the launch. A warp copies the packed
weights of its next tasks (packed_tile.py) to shared memory, the first ones before A is there. A
lies there in bfloat16, whole or a slice of its numbers at a time. The sums of all tasks wait in
shared memory, and are added up in their order at the end.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import cluster_ptx, ptx
from pyggml.backends.cuda.code.cluster_ptx import has_clusters
from pyggml.backends.cuda.code.jit import device, kernel, most_shared
from pyggml.backends.cuda.gemm.few_rows import (
    BLOCKS,
    FewRowsProduct,
    FusedNorm,
    by_kind,
    norm_argument,
    packed_path,
    part_argument,
    part_lines,
    share_out,
)
from pyggml.backends.cuda.gemm.packed_dots import grid_filler
from pyggml.backends.cuda.gemm.packed_tile import (
    EIGHT,
    ROWS,
    STEP,
    UNIT_OF_A,
    UNITS,
    WARP,
    PackedTileShape,
    Slices,
    TileLayout,
    a_reader,
    beginner,
    fetcher,
    finisher,
    keeper,
    multiplier,
    nothing,
    putter,
    settler,
)
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import (
    await_others,
    begins_early,
    least_shared,
    release_others,
)
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import HAS_PTX
from pyggml.backends.cuda.weights.packed import (
    PackedUnit,
    compile_closure,
    grid_words_of,
    unit_of,
)
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DType
from pyggml.sizes import round_up

MOST_ROWS = 32  # of A
_MOST_WARPS = 12
_SHAPES = ((12, 3), (12, 2), (8, 3), (8, 2), (6, 2), (4, 2), (2, 2))  # warps, places of each
_MOST_SLICES = 3  # of six, cuBLAS takes two thirds of the time
_SUMS_BYTES = 24 << 10  # of a block, of which more blocks take less
_FIXED = 128  # bytes of a block's shared memory before all else, with a barrier in it

# -- a launch ------------------------------------------------------------------------------------

_SOURCE = """
    warp, lane = np.int64(cuda.threadIdx.x >> 5), cuda.threadIdx.x & 31
    first, n_tiles = tiles_of(part, number)
    units, before = 4 * slices.all_steps, slices.of_first if half else np.int64(0)
    own_steps = slices.all_steps - before if half else slices.of_first
    here, own = layout.places + warp * places * layout.place, (layout.sums >> 2) + lane
    begin(barrier, half, n_tiles * 8 * m, m)
    fill?(memory, layout.grids)
    start, tile, step = settle(np.int64(0), np.int64(0), warp, n_tiles, slices.steps, own_steps)
    next_start, next_tile, next_step, place = start, tile, step, np.int64(0)
    for _ in range(places):
        to = here + place * layout.place
        FETCH
        place = place + 1 if place + 1 < places else 0
    await_others()
    now = np.int64(0)
    while now < own_steps:
        steps = min(slices.steps, own_steps - now)
        cuda.syncthreads()
        read_a(memory, floats, a, k, m, (before + now) * step_numbers, steps, now, norm, layout)
        if now + steps >= own_steps:
            release_others()
        cuda.syncthreads()
        while start == now:
            await_place()
            cuda.syncwarp()
            to = here + place * layout.place
            sums = multiply?(memory, to, layout, step >> is_gated)
            cuda.syncwarp()
            FETCH
            of_all = (tile * own_steps + now << is_gated) + step
            put(floats, own + of_all * of_task, sums)
            start, tile, step = settle(start, tile, step + warps, n_tiles, slices.steps, own_steps)
            place = place + 1 if place + 1 < places else 0
        now += slices.steps
    cuda.syncthreads()
    finish(
        memory, floats, barrier, part, first * 8, n_tiles * 8, half, k, m, layout, norm, own_steps
    )
    keep(floats, a, k, m, layout, norm)"""

_FETCH = """
if next_start < own_steps:
    of_w = next_step + (before + next_start << is_gated)
    fetch?(memory, to, part, first + next_tile, of_w, units)
ptx.commit_copies()
next_step += warps
next_start, next_tile, next_step = settle(
    next_start, next_tile, next_step, n_tiles, slices.steps, own_steps
)"""


def _source(kinds: Sequence[PackedTileShape]) -> str:
    """The source of a launch's kernel: each block computes some of one part. Names with ? are of
    functions that depend on the type of W."""
    lines = [
        "def product(parts, ends, a, k, m, layout, slices, norm):",
        "    clusters()",
        "    memory = cuda.shared.array(0, np.uint32, aligned)",
        "    floats = cuda.shared.array(0, np.float32)",
        f"    barrier = {'cuda.shared.array(1, np.uint64)' if kinds[0].halving else 'memory'}",
        "    block, half = np.int64(cuda.blockIdx.x >> halving), cuda.blockIdx.x & halving",
        *part_lines(kinds, "block"),
    ]
    for line in _SOURCE.split("\n"):
        room, word = line[: len(line) - len(line.lstrip())], line.strip()
        for one in _FETCH.split("\n") if word == "FETCH" else (word,):
            inner = room + one[: len(one) - len(one.lstrip())]
            text = one.strip()
            if "?" in text:
                text = by_kind(text.replace("?", "{}"), len(set(kinds)), inner)
            lines += [inner + text]
    return "\n".join(lines)


@device
def _tiles_of(part, number):
    """The first tile of block `number` of a part, and how many it has."""
    tiles, more = part[5]
    return number * tiles + min(number, more), tiles + (1 if number < more else 0)


@cache
def _kernel(kinds: tuple[PackedTileShape, ...]) -> Any:
    of_all = kinds[0]  # in all but the unit they are alike
    scope: dict[str, Any] = {
        "cuda": cuda, "np": np, "ptx": ptx, "places": of_all.places, "warps": of_all.warps,
        "step_numbers": STEP, "is_gated": of_all.is_gated, "of_task": of_all.n_sums * WARP,
        "await_others": await_others, "release_others": release_others, "tiles_of": _tiles_of,
        "settle": settler(of_all.warps, of_all.is_gated), "read_a": a_reader(of_all),
        "await_place": ptx.plain(f"cp.async.wait_group {of_all.places - 1};"),
        "put": putter(of_all), "finish": finisher(of_all), "keep": keeper(of_all),
        "begin": beginner(of_all), "halving": of_all.halving, "aligned": _FIXED,
        "clusters": cluster_ptx.clusters_of(2) if of_all.halving else nothing,
    }  # fmt: skip
    for i, kind in enumerate(dict.fromkeys(kinds)):
        scope |= {f"fill{i}": grid_filler(kind.unit) or nothing, f"fetch{i}": fetcher(kind)}
        scope[f"multiply{i}"] = multiplier(kind)
    run = kernel(
        compile_closure(_source(kinds), "product", scope), most_threads=WARP * of_all.warps,
        shared_bytes=most_shared() - of_all.halving * _FIXED,
    )  # fmt: skip
    return begins_early(run, lambda arguments: [w for part in arguments[0] for w in part[2:4]])


def _layout(
    kinds: Sequence[PackedTileShape], most_tiles: int, slices: Slices
) -> tuple[TileLayout, int]:
    """Of a block: its shared memory, and its bytes."""
    of_all = kinds[0]
    row = round_up(slices.steps * UNITS * UNIT_OF_A, 128) + 64
    squares = EIGHT * of_all.sixteens * row
    grids = squares + 64 * of_all.sixteens
    places = grids + max(grid_words_of(kind.unit).nbytes for kind in kinds)
    place = max(kind.task_bytes for kind in kinds)
    sums = places + of_all.warps * of_all.places * place + 16  # a load may go beyond the last word
    received = sums + most_tiles * _sums_of_tile(of_all, slices.of_first)
    n_bytes = received + of_all.halving * (4 * ROWS * (most_tiles << of_all.is_gated) + 64) * (
        8 * of_all.sixteens
    )
    return TileLayout(row, squares, grids, places, sums, received, place), n_bytes


def _sums_of_tile(shape: PackedTileShape, steps: int) -> int:
    """Bytes."""
    return 4 * WARP * shape.n_sums * (steps << shape.is_gated)


class TilePlan(NamedTuple):
    """How blocks, or clusters of two, share out a launch's parts: what each is compiled for, its
    blocks or clusters, and of a block its slices of A and its shared memory, in bytes."""

    kinds: tuple[PackedTileShape, ...]
    blocks: list[int]
    slices: Slices
    layout: TileLayout
    n_bytes: int


@cache
def plan(
    matrices: tuple[tuple[DType, int], ...], rows: int, k: int, is_gated: bool, has_norm: bool,
    vectorized: bool, most_bytes: int,
) -> TilePlan | None:  # fmt: skip
    """matrices: the type and the rows of each part's W. The fewest slices for which so much shared
    memory is enough for two places of eight warps, else the most warps; None if it never is."""
    sixteens, all_steps = -(-rows // 16), k // STEP
    halving = int(has_clusters() and all_steps > 1)
    own_steps = -(-all_steps >> halving)
    shares = share_out([n * dtype.row_bytes(k) for dtype, n in matrices], BLOCKS >> halving)
    tiles = [-(-n // ROWS) for _, n in matrices]
    for shapes, n_slices in product((_SHAPES[:4], _SHAPES[4:]), range(1, own_steps + 1)):
        for warps, places in shapes:
            kinds = tuple(
                PackedTileShape(
                    _unit(dtype), sixteens, warps, places, halving, is_gated, has_norm, vectorized
                )
                for dtype, _ in matrices
            )
            at_once = max(1, _SUMS_BYTES // _sums_of_tile(kinds[0], own_steps))
            both = zip(tiles, shares, strict=True)
            blocks = [min(n, max(of, -(-n // at_once))) for n, of in both]
            most_tiles = max(-(-n // of) for n, of in zip(tiles, blocks, strict=True))
            slices = Slices(-(-own_steps // n_slices), own_steps, all_steps)
            layout, n_bytes = _layout(kinds, most_tiles, slices)
            if n_bytes + halving * _FIXED <= most_bytes:
                return TilePlan(kinds, blocks, slices, layout, n_bytes)
    return None


def _unit(dtype: DType) -> PackedUnit:
    unit = unit_of(dtype.name, STEP)
    assert unit is not None
    return unit


def serves(
    matrices: tuple[tuple[DType, int], ...], rows: int, k: int,
    is_gated: bool = False, has_norm: bool = False,
) -> bool:  # fmt: skip
    """Whether there is such a launch, of matrices of these types and rows, and it pays."""
    if not HAS_PTX or rows > MOST_ROWS or k % STEP or not k:
        return False
    if not all(d.quantised and unit_of(d.name, STEP) for d, _ in matrices):
        return False
    of_all = plan(matrices, rows, k, is_gated, has_norm, True, most_shared())
    return of_all is not None and of_all.slices.of_first <= _MOST_SLICES * of_all.slices.steps


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
    matrices, is_gated = tuple((p.dtype, p.n) for p in parts), parts[0].up is not None
    p = plan(matrices, rows, k, is_gated, norm is not None, vectorized, most_shared())
    assert p is not None
    ends = tuple(np.int64(n) for n in np.cumsum(p.blocks))
    # Of each part the tiles of a block or cluster, and how many of these have one more.
    cuts = [divmod(-(-part.n // ROWS), n) for part, n in zip(parts, p.blocks, strict=True)]
    return launch(
        _kernel(p.kinds), int(ends[-1]) << p.kinds[0].halving, WARP * p.kinds[0].warps, stream,
        tuple(map(part_argument, parts, cuts)), ends, a, k, rows, p.layout, p.slices, of_norm,
        shared_bytes=max(p.n_bytes, least_shared()),
    )  # fmt: skip


# -- the path ------------------------------------------------------------------------------------


PACKED_TILES = packed_path(
    "packed tiles", lambda p: serves(((p.b.dtype, p.n),), p.m, p.k), products
)
