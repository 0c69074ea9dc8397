"""Attention in tiles, without the (T, S) matrix (Dao et al. 2022, 2023), whatever the tiles are.

s_ij = scale · q_i·k_j for span_i0 <= j < span_i1, else −∞
p_ij = exp(s_ij − lse_i),  lse_i = log Σ_j exp(s_ij),  o_i = Σ_j p_ij v_j

First K and V are packed. A task then takes a tile's queries of one head, and goes over the tiles of
keys with a running maximum m and a running sum (the paper's ℓ) of each query.

A kind of tiles is a subclass of ForwardTiles, and one of BackwardTiles (tiled_back.py). Fields are
its operands and its scratch, kernels its products and its softmax.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Int, Ints2
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import TaskStage, launch, stage, task_code
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward
from pyggml.kernels.attention.softmax import (
    BC,
    MASKED,
    ZERO,
    ScoreBlock,
    columns_in,
    divide_tile,
    group_ranges,
)
from pyggml.kernels.gemm.panels import LANES
from pyggml.sizes import round_up

# -- packing --------------------------------------------------------------------------------------


class KeyPacking(Frame):
    """How an operand (n, heads, D) is packed."""

    x: Floats3
    n_used: Int  # rows of x that are read
    spare: Floats2  # a row for each thread


class Packings:
    """The stages that pack keys and values, as far as any query of `span` sees them."""

    def __init__(self, span: np.ndarray) -> None:
        self._span = span
        self._stages: list[TaskStage] = []

    def add(self, code: Code, f: KeyPacking, n_tasks: int) -> None:
        """Add a stage, which packs f.x."""
        self._stages.append(stage(code, f, n_tasks))

    def then(self, *stages: TaskStage) -> Call:
        """The call that packs and then runs these stages."""
        return Call(_launch_seen, self._span, self._stages, stages)


def _launch_seen(
    span: np.ndarray, packings: list[TaskStage], stages: tuple[TaskStage, ...]
) -> None:
    """Pack keys up to the last that any query sees: the rest of a cache is empty."""
    n_used = int(span[:, 1].max())
    for packing in packings:
        packing.lies.put(n_used=n_used)
    launch(*packings, *stages)


# -- the tile -------------------------------------------------------------------------------------


class AttentionTiles(Frame):
    """What both passes have. Products take `group` of a tile's queries at once."""

    QUERIES: ClassVar[int]  # of a tile, whole groups
    GROUP: ClassVar[int]
    SCORES: ClassVar[tuple[int, int]]  # rows of S that exist at once, and floats of a row
    q: Floats3
    o: Floats3
    lse: Floats2
    span: Ints2
    scale: Float
    repeats: Int  # query heads to a key head
    n_queries: Int
    group: Int
    # of each thread
    s: Floats3  # SCORES
    starts: Ints2  # of each group, as group_ranges has them
    stops: Ints2
    spare: Floats2

    @kernel
    def begin(f, thread):
        """What a task does before its first product."""

    @kernel
    def end(f, thread):
        """What it does after its last one."""


class ForwardTiles(AttentionTiles):
    """A task takes one tile of queries of one head. The kernels of a kind are

    load(f, thread, head, first, n_rows)                 Q of a tile
    meet(f, thread, key_head, block, starts, stops, o)   of a tile of keys: S, P and o += P·V
    """

    o_tile: Floats3  # (QUERIES, width)
    m: Floats2
    norm: Floats2


def _forward_task(f, task, thread):
    """A tile of queries of one head. Tiles with few and with many keys alternate, so that
    neighbouring tasks take equally long."""
    n_tiles = (f.q.shape[0] + f.n_queries - 1) // f.n_queries
    head, turn = task // n_tiles, task % n_tiles
    first = (turn // 2 if turn % 2 == 0 else n_tiles - 1 - turn // 2) * f.n_queries
    n = min(f.n_queries, f.q.shape[0] - first)
    n_groups = (n + f.group - 1) // f.group
    n_rows = n_groups * f.group
    o, m, norm = f.o_tile[thread][:n_rows], f.m[thread], f.norm[thread]
    starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
    f.load(thread, head, first, n_rows)
    fill(o.reshape(-1), ZERO)
    fill(m, MASKED)
    fill(norm, ZERO)
    start, stop = group_ranges(starts, stops, f.span, first, f.group)
    f.begin(thread)
    for key in range(start // BC * BC, stop, BC):
        block = ScoreBlock(f.span, first, key, columns_in(start, stop, key, f.group))
        f.meet(thread, head // f.repeats, block, starts, stops, o)
    f.end(thread)
    divide_tile(f.o, f.lse, o, m, norm, head, first, n)


# -- binding --------------------------------------------------------------------------------------

Tiles = TypeVar("Tiles", bound=AttentionTiles)
Pack = Callable[[Packings, AttentionProblem, Any, Scratch], None]  # adds what packs its operands


def arrays_of_tile(tiles: type[AttentionTiles]) -> dict[str, Array]:
    """Scratch of both passes."""
    n_groups = round_up(tiles.QUERIES // tiles.GROUP, LANES)
    return {
        "s": per_thread(*tiles.SCORES),
        "starts": per_thread(n_groups, dtype=np.int32),
        "stops": per_thread(n_groups, dtype=np.int32),
    }


def bind_tiles(
    tiles: type[Tiles], p: AttentionProblem, a: Forward, scratch: Scratch, **fields: Any
) -> Tiles:
    """The frame; fields: what only one pass has."""
    own = {name: x for name, x in scratch.items() if name in tiles.fields}
    return tiles(
        q=a.q, o=a.o, lse=a.lse, span=a.span, scale=float(a.scale), repeats=p.repeats,
        n_queries=tiles.QUERIES, group=tiles.GROUP, **own, **fields,
    )  # fmt: skip


def tiled_forward(
    name: str,
    tiles: type[ForwardTiles],
    takes: Callable[[AttentionProblem], bool],
    arrays: Callable[[AttentionProblem], dict[str, Array]],
    pack: Pack,
    width: Callable[[int], int],
) -> AttentionPath[Forward]:
    """The path of a kind of tiles; arrays: its scratch; width: of a row of so many results."""
    code, rows = task_code(tiles)(_forward_task), round_up(tiles.QUERIES, LANES)

    def layout(p: AttentionProblem) -> Layout:
        o_tile = per_thread(tiles.QUERIES, width(p.value_size))
        sums = dict.fromkeys(("m", "norm"), per_thread(rows))
        return Layout(**arrays_of_tile(tiles), **arrays(p), o_tile=o_tile, **sums)

    def bind(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
        packings = Packings(a.span)
        pack(packings, p, a, scratch)
        f = bind_tiles(tiles, p, a, scratch)
        return packings.then(stage(code, f, p.n_heads * -(-p.n_queries // tiles.QUERIES)))

    return AttentionPath(name, True, takes, layout, bind)
